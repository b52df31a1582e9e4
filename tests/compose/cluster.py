"""The cluster in containers and the writers beside it, as the story handles them."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import images
from .engine import (
    COMPOSE_DIR,
    ROOT,
    EngineError,
    Project,
    compose_command,
    inspect,
    remove_named,
    run,
)

COORDINATORS = ("coordinator-1", "coordinator-2", "coordinator-3")
NODES = ("node-1", "node-2", "node-3")
ADDRESSES = ",".join(f"{name}:7400" for name in COORDINATORS)
PORTS = {"coordinator": 7400, "node": 7500}
WRITERS = Path(__file__).with_name("writers.py")
POLL_S = 0.3
START_S = 60.0
ANSWER_S = 10.0
WAIT_S = 90.0
ROLLING_S = 900.0

Status = dict[str, Any]


class Writers:
    """A load in its container, asked questions over its standard input."""

    def __init__(self, project: Project, program: Path = WRITERS) -> None:
        self.name = f"{project.name}-{program.stem}"
        shared = [ROOT / "tests" / folder for folder in ("checkers", "kit")]
        identity = ["--volume", f"{project.name}_tls-admin:/tls:ro"]
        identity += ["--env", "KOINON_TLS_BUNDLE=/tls/identity.pem"]
        self._process = subprocess.Popen(
            [
                *("docker", "run", "--interactive", "--rm", "--init", "--name", self.name),
                *("--network", project.network, "--read-only", "--cap-drop", "ALL"),
                *(part for f in shared for part in ("--volume", f"{f}:/srv/tests/{f.name}:ro")),
                *("--volume", f"{program}:/srv/{program.name}:ro"),
                *("--env", "PYTHONPATH=/srv", "--env", "PYTHONDONTWRITEBYTECODE=1"),
                *("--env", f"KOINON_COORDINATORS={ADDRESSES}"),
                *(identity if project.secured else ()),
                *("--entrypoint", "python3", images.NAME, f"/srv/{program.name}"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        self._starts_s = START_S  # what the next answer may take longer: the container's start
        self.said: list[str] = []
        for stream, take in (
            (self._process.stdout, self._answers.put),
            (self._process.stderr, self.said.append),
        ):
            threading.Thread(target=_pump, args=(stream, take), daemon=True).start()

    def ask(self, what: str, within_s: float = ANSWER_S, **values: Any) -> dict[str, Any]:
        """Return the answer.

        Raises:
            EngineError: the container is gone, or did not answer in time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **values}) + "\n")
            self._process.stdin.flush()
            answer = self._answers.get(timeout=within_s + self._starts_s)
            self._starts_s = 0.0
        except (OSError, queue.Empty) as error:
            said = "".join(self.said[-20:])
            raise EngineError(f"the writers do not answer {what!r}\n{said}") from error
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        run("docker", "rm", "--force", "--volumes", self.name)
        self._process.wait(30)


def _pump(stream: Any, take: Callable[[str], None]) -> None:
    for line in stream:
        take(line)


class Cluster:
    """The project's servers and what is done to them."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.services = [*COORDINATORS, *NODES]
        self._writers: Writers | None = None

    @property
    def writers(self) -> Writers:
        if self._writers is None:
            self._writers = Writers(self.project)
        return self._writers

    # --- asking -----------------------------------------------------------------------------------

    def status(self) -> Status:
        """The leader's status as writers.py tells it; empty if no coordinator answered."""
        answer = self.writers.ask("status")
        return {} if "error" in answer else answer

    def wait_for(
        self, condition: Callable[[Status], bool], what: str, timeout_s: float = WAIT_S
    ) -> Status:
        """Wait until the leader's status meets the condition; return it."""
        deadline = time.monotonic() + timeout_s
        status: Status = {}
        while time.monotonic() < deadline:
            status = self.status()
            if status.get("leader") and condition(status):
                return status
            time.sleep(POLL_S)
        raise EngineError(f"not within {timeout_s:g} s: {what}; at last {json.dumps(status)}")

    def wait_ok(self) -> Status:
        """Wait until all is well: everything served, every copy in sync, every member there."""
        return self.wait_for(
            lambda s: s["ok"] and not s["short"] and not s["silent"], "all is well again"
        )

    def wait_serving(self, service: str) -> None:
        """Wait until the server itself says that it serves."""
        port = PORTS[service.split("-")[0]]
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                self.execute(service, "koinon-health", f"127.0.0.1:{port}")
                return
            except EngineError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL_S)

    def execute(self, service: str, *command: str, timeout_s: float = 60.0) -> str:
        container = self.project.container(service)
        return run("docker", "exec", container, *command, timeout_s=timeout_s)

    def administer(self, *command: str, timeout_s: float = 60.0) -> str:
        """Run ``koinon`` as an operator does, as the user root where there are users."""
        if not self.project.secured:
            return self.execute("coordinator-1", "koinon", *command, timeout_s=timeout_s)
        return self.project.compose(
            "run", "--rm", "--no-deps", "-T", "admin", *command, timeout_s=timeout_s
        )

    def certificate_of(self, service: str) -> dict[str, Any]:
        """Return what the server's identity file says."""
        shown = self.execute(service, "koinon", "certs", "show", "/tls/identity.pem", "--json")
        found: dict[str, Any] = json.loads(shown)
        return found

    def certificates(self, command: str) -> str:
        """Run the service that makes certificates."""
        return self.project.compose("run", "--rm", "--no-deps", "-T", "certificates", command)

    # --- doing ------------------------------------------------------------------------------------

    def cut_off(self, service: str) -> None:
        container = self.project.container(service)
        run("docker", "network", "disconnect", self.project.network, container)

    def reconnect(self, service: str) -> None:
        # Compose has given the service's name to the connection that is gone.
        container = self.project.container(service)
        network = self.project.network
        run("docker", "network", "connect", "--alias", service, network, container)

    def address(self, service: str) -> str:
        template = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        return inspect(self.project.container(service), template)

    def restart_rolling(self) -> str:
        """Run the script that operators use; return what it said."""
        return run(
            *(str(COMPOSE_DIR / "rolling-restart.sh"), "--recreate", *self.project.options),
            timeout_s=ROLLING_S,
            environment={
                **self.project.environment,
                "COMPOSE": " ".join(compose_command()),
                "KOINON_TLS": "1" if self.project.secured else "",
            },
            cwd=COMPOSE_DIR,
        )

    def save_logs(self, directory: Path) -> None:
        """Write what every container has logged, and what the engine says of it."""
        directory.mkdir(parents=True, exist_ok=True)
        for container in self.project.containers():
            name = inspect(container, "{{.Name}}").strip("/")
            with (directory / f"{name}.log").open("w") as log:
                command = ["docker", "logs", "--timestamps", container]
                subprocess.run(command, stdout=log, stderr=log, timeout=60, check=False)
            (directory / f"{name}.json").write_text(run("docker", "inspect", container))
        if self._writers is not None:
            (directory / "writers.log").write_text("".join(self._writers.said))

    def tear_down(self) -> None:
        if self._writers is not None:
            self._writers.close()
        try:
            self.project.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")
        finally:  # whatever Compose does not regard as its own any more
            remove_named(self.project.name)
