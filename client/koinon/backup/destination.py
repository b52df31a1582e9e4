"""The directory or object store that backups are in, through ``pyarrow.fs``.

All files of the backup ``ID`` lie under ``DESTINATION/ID/``; its manifest is written last. No file
is ever renamed, since object stores have no rename. Credentials and endpoints come from the
environment (AWS_ACCESS_KEY_ID and the like), never from the text that names the destination.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from koinon.backup import manifest as manifests
from koinon.backup.manifest import BackupDamagedError, BackupError, FilePart, Manifest
from koinon_proto.contract.errors import ConfigurationError

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://")
_CREDENTIALS = re.compile(r"://[^/?#]*:[^/?#]*@|[?&](access_key|secret_key|session_token)=")


def _fs() -> Any:
    try:
        import pyarrow.fs
    except ModuleNotFoundError as missing:
        reason = "backups need pyarrow: pip install 'koinon[cli]'"
        raise ConfigurationError(reason=reason) from missing
    return pyarrow.fs


@dataclass(frozen=True, kw_only=True)
class Found:
    """A directory of a destination that holds a backup, finished or not. ``manifest`` is None if it
    is missing or cannot be read; ``fault`` then says why it cannot be read. ``changed_s``: when the
    newest file was written, Unix seconds.
    """

    backup_id: str
    manifest: Manifest | None
    fault: str
    changed_s: float
    file_bytes: int

    @property
    def is_unfinished(self) -> bool:
        return self.manifest is None and not self.fault


class Destination:
    """A place for backups. Thread-safe."""

    def __init__(self, text: str) -> None:
        """Open a destination. ``text``: a directory, or a URL that ``pyarrow.fs`` knows.

        Raises:
            ConfigurationError: ``text`` is empty or no known URL, or holds a secret, or pyarrow is
                missing.
        """
        # an empty text would mean the current directory, and files there would be deleted
        if not text:
            raise ConfigurationError(reason="the destination is empty: name a directory or a URL")
        if _CREDENTIALS.search(text):
            raise ConfigurationError(
                reason="the destination holds a secret, which others can see in the list of "
                "processes: leave it out, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "or configure the object store's own tools"
            )
        self.text = text
        fs = _fs()
        if not _SCHEME.match(text):
            self._fs, self._root = fs.LocalFileSystem(), str(Path(text).absolute())
            return
        with self._errors():
            self._fs, root = fs.FileSystem.from_uri(text)
            self._root = root.rstrip("/")

    @property
    def _is_local(self) -> bool:
        return bool(self._fs.type_name == "local")

    @contextlib.contextmanager
    def _errors(self, path: str = "") -> Iterator[None]:
        """Raise the file system's errors as BackupError (pyarrow raises ValueError for some)."""
        try:
            yield
        except (OSError, ValueError) as error:
            where = f"{self.text.rstrip('/')}/{path}" if path else self.text
            kind = BackupDamagedError if isinstance(error, FileNotFoundError) else BackupError
            raise kind(reason=f"{where}: {error}") from error

    # --- files -----------------------------------------------------------------------------

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"

    def write(self, path: str) -> HashedFile:
        """Create a file, to be written and closed by the caller."""
        full = self._path(path)
        with self._errors(path):
            if self._is_local:
                self._fs.create_dir(full.rpartition("/")[0], recursive=True)
            return HashedFile(self._fs.open_output_stream(full), full if self._is_local else "")

    def read(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            BackupDamagedError: the file is missing.
            BackupError: the file cannot be read.
        """
        with self._errors(path), self._fs.open_input_stream(self._path(path)) as stream:
            content: bytes = stream.read()
        return content

    def read_part(self, backup_id: str, part: FilePart) -> bytes:
        """Return the content of a file that the manifest lists, once its size and SHA-256 are
        checked.

        Raises:
            BackupDamagedError: the file is missing or altered.
        """
        path = f"{backup_id}/{part.path}"
        content = self.read(path)
        if len(content) != part.bytes:
            reason = f"{path}: has {len(content)} bytes; the manifest says {part.bytes}"
            raise BackupDamagedError(reason=reason)
        if hashlib.sha256(content).hexdigest() != part.sha256:
            raise BackupDamagedError(reason=f"{path}: its SHA-256 is not the manifest's")
        return content

    def sizes(self, backup_id: str) -> dict[str, int]:
        """Return the sizes in bytes of a backup's files, by their paths below its directory."""
        head = self._path(backup_id) + "/"
        return {
            info.path.removeprefix(head): info.size for info in self._files(self._path(backup_id))
        }

    def _files(self, folder: str) -> list[Any]:
        fs = _fs()
        selector = fs.FileSelector(folder, allow_not_found=True, recursive=True)
        with self._errors():
            return [i for i in self._fs.get_file_info(selector) if i.type == fs.FileType.File]

    # --- backups ---------------------------------------------------------------------------

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest: from then on the directory counts as a backup."""
        with self.write(f"{manifest.backup_id}/{manifests.NAME}") as file:
            file.write(manifests.encode(manifest))
        if self._is_local:
            for folder in (self._path(manifest.backup_id), self._root):
                _sync(folder)

    def manifest(self, backup_id: str) -> Manifest:
        """Read and check a backup's manifest.

        Raises:
            BackupDamagedError: the manifest is missing or altered, or belongs to another backup.
        """
        found = manifests.decode(self.read(f"{backup_id}/{manifests.NAME}"))
        if found.backup_id != backup_id:
            reason = f"{backup_id}/{manifests.NAME} is the manifest of {found.backup_id}"
            raise BackupDamagedError(reason=reason)
        return found

    def backups(self) -> list[Found]:
        """Return all backups here, finished or not, the oldest first."""
        by_id: dict[str, list[Any]] = {}
        for info in self._files(self._root):
            name = info.path.removeprefix(self._root + "/").partition("/")[0]
            if manifests.is_backup_id(name):
                by_id.setdefault(name, []).append(info)
        return [self._found(backup_id, infos) for backup_id, infos in sorted(by_id.items())]

    def _found(self, backup_id: str, infos: list[Any]) -> Found:
        manifest, fault = None, ""
        if any(info.path == self._path(f"{backup_id}/{manifests.NAME}") for info in infos):
            try:
                manifest = self.manifest(backup_id)
            except BackupError as error:
                fault = error.reason
        return Found(
            backup_id=backup_id,
            manifest=manifest,
            fault=fault,
            changed_s=max((i.mtime_ns or 0) for i in infos) / 1e9,
            file_bytes=sum(info.size for info in infos),
        )

    def delete(self, backup_id: str) -> None:
        """Delete a backup, its manifest first: an interrupted deletion leaves no directory that
        counts as a backup.
        """
        assert manifests.is_backup_id(backup_id)
        folder = self._path(backup_id)
        paths = [info.path for info in self._files(folder)]
        with self._errors(backup_id):
            for path in sorted(paths, key=lambda path: not path.endswith(f"/{manifests.NAME}")):
                self._fs.delete_file(path)
            if self._is_local and Path(folder).exists():
                self._fs.delete_dir(folder)


class HashedFile:
    """A file that is written once, from its beginning to its end, and hashed meanwhile; a context
    that closes it. pyarrow writes to it as to any Python file.
    """

    def __init__(self, stream: Any, local_path: str) -> None:
        """``local_path``: the path of a local file, which ``close`` fsyncs; "": not local."""
        self._stream = stream
        self._local_path = local_path
        self._hash = hashlib.sha256()
        self.bytes = 0  # bytes written so far
        self.closed = False

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: Any) -> int:
        self._stream.write(data)
        self._hash.update(data)
        size = memoryview(data).nbytes
        self.bytes += size
        return size

    def tell(self) -> int:
        return self.bytes

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._stream.close()
        if self._local_path:
            _sync(self._local_path)


def _sync(path: str) -> None:
    """Call fsync on a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def split_source(text: str) -> tuple[str, str]:
    """Split a source into its destination and its backup id ("": the newest backup there)."""
    head, slash, last = text.rstrip("/").rpartition("/")
    if manifests.is_backup_id(last):
        return head or slash or ".", last
    return text, ""
