"""The images that the test runs: Koinon's own, and stand-ins for those of a registry that is not
reached, made from Debian's packages and given the very names that Dockerfile and compose.yaml use.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

from .engine import COMPOSE_DIR, ROOT, EngineError, lines, run, succeeds

BASE = "debian:bookworm-slim"
PROMETHEUS = "prom/prometheus:v2.53.4"
GRAFANA = "grafana/grafana:11.6.0"
SUITE, PYTHON = "bookworm", "3.11"
GLIBC_MINOR = 36
"""Debian's suite, its Python, and its glibc: what the wheels have to run on."""

NAME = "koinon-compose-test"
STAND_IN = "org.koinon.stand-in"
BUILD_DIR = COMPOSE_DIR / "build"
BUILD_TIMEOUT_S = 900.0
PULL_TIMEOUT_S = 90.0
SLIMMED = (
    "usr/share/doc/*",
    "usr/share/man/*",
    "usr/share/info/*",
    "usr/share/locale/*",
    "var/cache/apt/*",
    "var/cache/debconf/*-old",
    "var/lib/apt/lists/*",
    "var/log/*",
)
_PROMETHEUS_DOCKERFILE = f"""\
FROM {BASE}
RUN apt-get update && cd /tmp && apt-get download prometheus \
    && dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x -C / ./usr/bin \
    && rm -rf /tmp/* /var/lib/apt/lists/* && install -d -o 65534 -g 65534 /prometheus
USER 65534
WORKDIR /prometheus
ENTRYPOINT ["prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
"""

Say = Callable[[str], None]


class MissingToolError(Exception):
    """Something has to be installed first; the message says what and how."""


def exists(image: str) -> bool:
    return succeeds("docker", "image", "inspect", image)


def is_stand_in(image: str) -> bool:
    template = '{{index .Config.Labels "' + STAND_IN + '"}}'
    return run("docker", "image", "inspect", "--format", template, image) == "yes"


def size_mb(image: str) -> float:
    return int(run("docker", "image", "inspect", "--format", "{{.Size}}", image)) / 1e6


def have_base(say: Say) -> None:
    """See that the Dockerfile's base is there: as it is, pulled, or made here.

    Raises:
        MissingToolError: it has to be made here, and debootstrap is missing, or root's rights.
    """
    if exists(BASE):
        origin = "made here by an earlier run" if is_stand_in(BASE) else "as it was pulled"
        say(f"base image {BASE}: on this machine already, {origin}")
    elif succeeds("docker", "pull", BASE, timeout_s=PULL_TIMEOUT_S):
        say(f"base image {BASE}: pulled")
    else:
        _debootstrap()
        say(
            f"base image {BASE}: no registry is reached, so it was made here from Debian's "
            f"packages ({size_mb(BASE):,.0f} MB); it stays for the next run"
        )


def _debootstrap() -> None:
    program = shutil.which("debootstrap", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        raise MissingToolError(
            f"No registry has {BASE}, and debootstrap, which would make it here, is not "
            "installed:\n  apt-get install debootstrap"
        )
    with tempfile.TemporaryDirectory(prefix="koinon-base-") as directory:
        try:
            run(program, "--variant=minbase", SUITE, directory, timeout_s=BUILD_TIMEOUT_S)
        except EngineError as error:
            raise MissingToolError(
                f"debootstrap needs root and Debian's packages: {error}"
            ) from None
        for pattern in SLIMMED:
            for path in Path(directory).glob(pattern):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        _import_tree(Path(directory))


def _import_tree(directory: Path) -> None:
    label = f"LABEL {STAND_IN}=yes"
    with subprocess.Popen(["tar", "-C", str(directory), "-c", "."], stdout=subprocess.PIPE) as tar:
        done = subprocess.run(
            ["docker", "import", "--change", label, "--change", 'CMD ["bash"]', "-", BASE],
            stdin=tar.stdout,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
    if done.returncode or tar.returncode:
        raise EngineError(f"docker import of the base image failed: {done.stderr.strip()}")


def have_wheels(say: Say, *, spark: bool) -> None:
    """Download what the image needs, by this machine's pip as it is set up, if the base is a
    stand-in; else see that the image is built from the index.
    """
    if not is_stand_in(BASE):
        shutil.rmtree(BUILD_DIR, ignore_errors=True)
        return
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    made = _wheelhouse(
        "wheels", ["server", "console"], extra=["pip", *project["build-system"]["requires"]]
    )
    if spark:
        made = _wheelhouse("spark-wheels", ["spark"], extra=[], sources=["pyspark"]) or made
    how = "downloaded by this machine's pip" if made else "downloaded by an earlier run"
    say(f"Python packages: {how}, in {BUILD_DIR.relative_to(ROOT)}")


def _wheelhouse(
    name: str, extras: list[str], *, extra: list[str], sources: list[str] | None = None
) -> bool:
    """Fill a directory with wheels for the image's Python; return whether that had to be done.
    ``sources`` come as source packages only, and are plain Python.
    """
    program = str(COMPOSE_DIR / "image" / "requirements.py")
    wanted = lines(sys.executable, program, str(ROOT / "pyproject.toml"), *extras) + extra
    stamp = hashlib.sha256("\n".join([PYTHON, *wanted]).encode()).hexdigest()
    directory = BUILD_DIR / name
    stamped = directory / "made-for.txt"
    if stamped.exists() and stamped.read_text() == stamp:
        return False
    shutil.rmtree(directory, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = [w for w in wanted if any(w.startswith(source) for source in sources or ())]
    if built:
        run(*pip, "wheel", "--wheel-dir", str(directory), *built, timeout_s=BUILD_TIMEOUT_S)
    machine = run("uname", "-m")
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC_MINOR, 4, -1)]
    platforms = [
        part for tag in (*tags, f"manylinux2014_{machine}") for part in ("--platform", tag)
    ]
    command = [*pip, "download", "--only-binary=:all:", "--python-version", PYTHON, *platforms]
    rest = [w for w in wanted if w not in built]
    links = ["--find-links", str(directory)] if built else []
    run(*command, *links, "--dest", str(directory), *rest, timeout_s=BUILD_TIMEOUT_S)
    stamped.write_text(stamp)
    return True


def build(target: str, tag: str) -> None:
    """Build the Dockerfile's target under this name."""
    command = ["docker", "build", "--force-rm", "--network", "host"]
    command += ["--file", "compose/Dockerfile", "--target", target, "--tag", tag, "."]
    _renaming(tag, *command)


def tag(image: str, name: str) -> None:
    """Give the image one more name."""
    _renaming(name, "docker", "tag", image, name)


def _renaming(name: str, *command: str) -> None:
    """Run what gives the name to an image; the one that had it goes, unless somebody uses it."""
    listing = ("docker", "image", "ls", "--quiet", "--no-trunc")
    before = lines(*listing, name)
    run(*command, timeout_s=BUILD_TIMEOUT_S)
    for old in set(before) - set(lines(*listing, name)):
        succeeds("docker", "image", "rm", old)


def build_koinon() -> None:
    """Build the image of the servers. Its stages have names too, so that they can be removed."""
    for stage in ("builder", "package"):
        build(stage, f"{NAME}-stage-{stage}")
    build("koinon", NAME)


def build_spark() -> None:
    build("spark-builder", f"{NAME}-stage-spark")
    build("spark", f"{NAME}-spark")


def build_faults() -> None:
    build("faults", f"{NAME}-faults")


def have_prometheus(say: Say) -> bool:
    """See that Prometheus's image is there, or a stand-in from Debian's package."""
    if not exists(PROMETHEUS) and not succeeds(
        "docker", "pull", PROMETHEUS, timeout_s=PULL_TIMEOUT_S
    ):
        try:
            run(
                *("docker", "build", "--force-rm", "--network", "host"),
                *("--label", f"{STAND_IN}=yes", "--tag", PROMETHEUS, "-"),
                input_text=_PROMETHEUS_DOCKERFILE,
                timeout_s=BUILD_TIMEOUT_S,
            )
        except EngineError as error:
            say(f"Prometheus is not tested: no registry is reached, nor Debian's package ({error})")
            return False
    if is_stand_in(PROMETHEUS):
        version = run("docker", "run", "--rm", PROMETHEUS, "--version").split("\n")[0]
        say(f"{PROMETHEUS} is a stand-in here, Debian's package: {version[:40]}")
    return True


def have_grafana() -> bool:
    return exists(GRAFANA) or succeeds("docker", "pull", GRAFANA, timeout_s=PULL_TIMEOUT_S)


def remove() -> list[str]:
    """Remove every image that was made here, and the downloads; return the images' names."""
    listed = run(
        "docker", "image", "ls", "--no-trunc", "--format", "{{.Repository}}:{{.Tag}} {{.ID}}"
    )
    ids = dict(line.split() for line in listed.splitlines())
    made = {identity for name, identity in ids.items() if name.startswith(NAME)}
    ours = [name for name, identity in ids.items() if identity in made]
    ours += [name for name in (PROMETHEUS, BASE) if exists(name) and is_stand_in(name)]
    for name in ours:
        run("docker", "image", "rm", "--force", name)
    shutil.rmtree(BUILD_DIR, ignore_errors=True)
    return ours
