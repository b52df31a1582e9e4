"""Docker and Compose as commands: which of them there are, run within a bounded time.

Commands run in a session of their own, so that Ctrl-C ends this program in its own order and does
not cut a command short that is cleaning up.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPOSE_DIR = ROOT / "compose"
TIMEOUT_S = 120.0
TAIL_CHARS = 3000


class EngineError(Exception):
    """A command of Docker's or Compose's failed, or took too long."""


def run(
    *command: str,
    timeout_s: float = TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    input_text: str | None = None,
) -> str:
    """Run the command; return its standard output, stripped.

    Raises:
        EngineError: it failed, cannot be started, or took longer.
    """
    shown = " ".join(command)
    try:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL if input_text is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise EngineError(f"{shown}: {error}") from error
    try:
        said, complained = process.communicate(input_text, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"not within {timeout_s:g} s: {shown}") from error
    finally:
        if process.poll() is None:  # whatever it has started ends with it
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        tail = (said + complained).strip()[-TAIL_CHARS:]
        raise EngineError(f"exit code {process.returncode}: {shown}\n{tail}")
    return said.strip()


def succeeds(*command: str, timeout_s: float = TIMEOUT_S) -> bool:
    try:
        run(*command, timeout_s=timeout_s)
    except EngineError:
        return False
    return True


def lines(*command: str) -> list[str]:
    return run(*command).split()


@functools.cache
def compose_command() -> tuple[str, ...]:
    """Return ``docker compose`` or, where there is only that, ``docker-compose``.

    Raises:
        EngineError: there is neither.
    """
    if succeeds("docker", "compose", "version"):
        return ("docker", "compose")
    if shutil.which("docker-compose"):
        return ("docker-compose",)
    raise EngineError("neither 'docker compose' nor 'docker-compose' is installed")


def engine_answers() -> bool:
    return shutil.which("docker") is not None and succeeds("docker", "info", timeout_s=20.0)


class Project:
    """One Compose project of files in compose/, and its variables."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        self.name = name
        self.network = f"{name}_default"
        self.files = ["compose.yaml"]
        self.environment = {**environment, "COMPOSE_PROJECT_NAME": name}

    @property
    def options(self) -> list[str]:
        """The options that tell Compose the project's files."""
        return [part for file in self.files for part in ("--file", file)]

    def compose(self, *arguments: str, timeout_s: float = TIMEOUT_S) -> str:
        return run(
            *compose_command(),
            *self.options,
            *arguments,
            timeout_s=timeout_s,
            environment=self.environment,
            cwd=COMPOSE_DIR,
        )

    @property
    def secured(self) -> bool:
        """True if the servers take only callers that show a certificate."""
        return "compose.tls.yaml" in self.files

    def container(self, service: str) -> str:
        """Return the id of the service's container, running or not."""
        found = self.containers(service)
        if not found:
            raise EngineError(f"{service} has no container")
        return found[0]

    def containers(self, service: str = "") -> list[str]:
        labels = ["--filter", f"label=com.docker.compose.project={self.name}"]
        if service:
            labels += ["--filter", f"label=com.docker.compose.service={service}"]
        return lines("docker", "ps", "--all", "--quiet", *labels)


def inspect(container: str, template: str) -> str:
    return run("docker", "inspect", "--format", template, container)


def remove_named(prefix: str) -> list[str]:
    """Remove every container, volume and network whose name begins so; return their names."""
    removed = []
    for kind, listing, name in (
        ("container", ("ps", "--all"), "{{.Names}}"),
        ("volume", ("volume", "ls"), "{{.Name}}"),
        ("network", ("network", "ls"), "{{.Name}}"),
    ):
        found = lines("docker", *listing, "--format", name, "--filter", f"name={prefix}")
        ours = [name for name in found if name.startswith(prefix)]
        if ours:
            force = {"container": ("--force", "--volumes"), "volume": ("--force",)}.get(kind, ())
            run("docker", kind, "rm", *force, *ours)
        removed += ours
    return removed
