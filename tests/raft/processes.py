"""A Raft group of real processes, driven from a test or a benchmark.

Each wait is for a condition and has a bound. Only processes started here are ever signalled.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tests.kit.addresses import free_addresses
from tests.kit.waiting import wait_until

TIMEOUT_S = 90.0
ROOT = Path(__file__).resolve().parents[2]

_Found = TypeVar("_Found")


class RemoteError(Exception):
    """The member answered with an error; `kind` is its class's name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Call:
    """A request under way."""

    def __init__(self, process: MemberProcess, request_id: int) -> None:
        self._process = process
        self._request_id = request_id

    def result(self, timeout_s: float = TIMEOUT_S) -> Any:
        answer = self._process.take_answer(self._request_id, timeout_s)
        if "error" in answer:
            raise RemoteError(answer["error"], answer["text"])
        return answer["result"]

    def acknowledged_so_far(self) -> set[str]:
        """Return all acknowledgements of a reporting load that have reached this side."""
        return set(self._process.acknowledged)


class MemberProcess:
    """One member, across its restarts."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.member_id: str = settings["member_id"]
        self.acknowledged: list[str] = []
        self.stop_event: dict[str, Any] | None = None
        self.store_id = ""
        self._answers: dict[int, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._next_id = 0
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self.is_paused = False

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def data_dir(self) -> Path:
        return Path(self.settings["data_dir"])

    def start(self, *, wait: bool = True) -> None:
        self.stop_event, self.store_id = None, ""
        environment = dict(os.environ)
        packages = [str(ROOT / name) for name in ("coordinator", "node", "client", "proto")]
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *packages])
        log_path = self.data_dir.with_suffix(".log")
        with log_path.open("a") as log_file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.raft.member_process", json.dumps(self.settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                cwd=ROOT,
                env=environment,
            )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        if wait:
            wait_until(
                lambda: self.store_id or self.stop_event or not self.is_alive,
                f"{self.member_id} starts, or says why not (see {log_path})",
            )

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                continue  # cut short by a kill
            with self._changed:
                if "id" in message:
                    self._answers[message["id"]] = message
                elif message["event"] == "acknowledged":
                    self.acknowledged.extend(message["names"])
                elif message["event"] == "started":
                    self.store_id = message["store_id"]
                else:
                    self.stop_event = message
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def begin(self, op: str, **arguments: Any) -> Call:
        assert self._process is not None
        assert self._process.stdin is not None
        with self._changed:
            self._next_id += 1
            request_id = self._next_id
        request = {"id": request_id, "op": op, **arguments}
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise RemoteError("Dead", f"{self.member_id} is not running") from error
        return Call(self, request_id)

    def call(self, op: str, **arguments: Any) -> Any:
        seconds = arguments.get("seconds", 0.0)
        return self.begin(op, **arguments).result(TIMEOUT_S + seconds)

    def take_answer(self, request_id: int, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while request_id not in self._answers:
                if not self.is_alive:
                    raise RemoteError("Dead", f"{self.member_id} died")
                if time.monotonic() > deadline:
                    raise RemoteError("Timeout", f"{self.member_id} did not answer")
                self._changed.wait(0.05)
            return self._answers.pop(request_id)

    def wait_for_progress(self, count: int) -> None:
        target = len(self.acknowledged) + count
        wait_until(
            lambda: len(self.acknowledged) >= target, f"{self.member_id} acknowledges {count} more"
        )

    # -- faults

    def kill(self) -> None:
        """kill -9, and read what it had still said."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.is_paused = False
            assert self._reader is not None
            self._reader.join(TIMEOUT_S)
            assert self._process.stdin is not None
            self._process.stdin.close()

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        self.is_paused = True

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self.is_paused = False


class Cluster:
    """A group of `size` voters under one directory; killed on exit."""

    def __init__(self, directory: Path, size: int, **settings: Any) -> None:
        self.directory = directory
        self.settings = settings
        addresses = {f"m{n}": address for n, address in enumerate(free_addresses(size), start=1)}
        self.members = {
            member_id: self.make_member(member_id, address, addresses)
            for member_id, address in addresses.items()
        }

    def make_member(
        self, member_id: str, address: str, initial_members: dict[str, str]
    ) -> MemberProcess:
        return MemberProcess(
            {
                "member_id": member_id,
                "listen": address,
                "data_dir": str(self.directory / member_id),
                "initial_members": initial_members,
                **self.settings,
            }
        )

    def __enter__(self) -> Cluster:
        for member in self.members.values():
            member.start(wait=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for member in self.members.values():
            member.kill()

    @staticmethod
    def clock() -> float:
        return time.monotonic()

    def wait_for_leader(
        self, *, timeout_s: float = TIMEOUT_S, other_than: str = ""
    ) -> MemberProcess:
        """The member that serves in the highest term."""

        def find() -> MemberProcess | None:
            serving = []
            for member in self.members.values():
                if not member.is_alive or member.is_paused or not member.store_id:
                    continue
                try:
                    status = member.begin("status").result(timeout_s=5.0)
                except RemoteError:
                    continue
                if status["serving_term"] is not None and member.member_id != other_than:
                    serving.append((status["serving_term"], member))
            return max(serving, key=lambda found: found[0])[1] if serving else None

        return wait_until(find, "a leader serves", timeout_s=timeout_s)
