"""A store's files behind a URL: `s3://bucket/folder`, `gs://…`, or any scheme that fsspec knows.

The store needs little of a file system, and object stores have it: a written object appears whole or not at all and is
seen by the next listing (S3 since 2020), so no rename is needed where a local disk needs one. What they lack is a lock
that the kernel frees, so writers use claims (locks.py). The order of writes is what keeps rows safe, here as on a disk:
a part is complete before the first of the files that it joins is deleted, and a row that stands twice counts once.
So even two writers that do not see each other lose nothing; the claim is there to tell people, not to save them.

A server may be away for a while, and a connection cut in the middle of a file: every operation waits and tries again
(retries.py), lengths are checked, and credentials are refused in URLs (urls.py).
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow.fs import FileSelector, FileSystem, FSSpecHandler, PyFileSystem

from fp4dse.dse import ConfigError
from fp4dse.dse.program.urls import redacted, refuse_credentials
from fp4dse.results.store.retries import ShortRead, with_retries

CHUNK = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class RemotePath:
    """A path behind a URL, with as much of pathlib.Path as the store uses.

    `path`: the file system's name of what `url` names. `patient`: wait for a server that cannot be reached.
    """

    url: str = field(repr=False)
    path: str
    fs: Any = field(default=None, compare=False, repr=False)
    patient: bool = field(default=True, compare=False, repr=False)

    def __str__(self) -> str:
        return redacted(self.url)

    def __truediv__(self, name: str) -> RemotePath:
        head, mark, query = self.url.partition("?")
        return replace(self, url=f"{head}/{name}{mark}{query}", path=f"{self.path}/{name}")

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        head, mark, query = self.url.partition("?")
        return replace(self, url=head.rpartition("/")[0] + mark + query, path=self.path.rpartition("/")[0])

    def exists(self) -> bool:
        return self._kind() != "NotFound"

    def is_dir(self) -> bool:
        return self._kind() == "Directory"

    def stat(self) -> SimpleNamespace:
        """st_size in bytes, st_mtime_ns as the server has it. FileNotFoundError if it is gone."""
        info = self._info()
        if info.type.name == "NotFound":
            raise FileNotFoundError(str(self))
        return SimpleNamespace(st_size=info.size, st_mtime_ns=info.mtime_ns)

    def iterdir(self) -> Iterator[RemotePath]:
        for info in self._do(lambda: self.fs.get_file_info(FileSelector(self.path, allow_not_found=True))):
            if info.base_name:
                yield self / info.base_name

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        return (entry for entry in self.iterdir() if fnmatch.fnmatchcase(entry.name, pattern))

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """Does nothing: a folder exists as soon as something is in it."""

    def read_bytes(self) -> bytes:
        """The whole content."""
        return b"".join(self._do(lambda: list(self._chunks())))

    def sha256(self) -> str:
        """SHA-256 of all its bytes, in hex digits."""

        def digest() -> str:
            state = hashlib.sha256()
            for chunk in self._chunks():
                state.update(chunk)
            return state.hexdigest()

        return self._do(digest)

    def write_bytes(self, data: bytes | memoryview) -> None:
        """The whole object or none. What stood there before stays until the new one is complete."""
        self._do(lambda: self._upload(data))

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._do(lambda: self.fs.delete_file(self.path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def replace(self, target: RemotePath) -> None:
        """Copy, then delete: a process that dies in between leaves both."""
        self._do(lambda: self.fs.copy_file(self.path, target.path))
        self.unlink(missing_ok=True)

    def _chunks(self) -> Iterator[bytes]:
        """ShortRead where fewer bytes arrive than there are."""
        size, arrived = self.fs.get_file_info(self.path).size or 0, 0
        with self.fs.open_input_stream(self.path) as stream:
            while chunk := stream.read(CHUNK):
                arrived += len(chunk)
                yield chunk
        if arrived < size:
            raise ShortRead(f"{arrived} of {size} bytes arrived")

    def _upload(self, data: bytes | memoryview) -> None:
        stream = self.fs.open_output_stream(self.path)
        stream.write(data)
        stream.close()
        size = self.fs.get_file_info(self.path).size
        if size != len(data):  # a file system that is no object store
            with contextlib.suppress(OSError):
                self.fs.delete_file(self.path)
            raise ShortRead(f"{size} of {len(data)} bytes arrived")

    def _kind(self) -> str:
        """`NotFound`, `File` or `Directory`."""
        return str(self._info().type.name)

    def _info(self) -> Any:
        return self._do(lambda: self.fs.get_file_info(self.path))

    def _do(self, action: Callable[[], T]) -> T:
        return with_retries(action, self) if self.patient else action()


AnyPath = Path | RemotePath
"""A path on a disk or behind a URL."""


def without_retries(path: AnyPath) -> AnyPath:
    """The same path, for an operation that is tried once and may fail."""
    return replace(path, patient=False) if isinstance(path, RemotePath) else path


def locate(text: str | AnyPath) -> AnyPath:
    """A local path as it is; a URL (`scheme://…`) as a RemotePath. ConfigError on credentials in the URL, and on a
    scheme that nobody knows."""
    if not isinstance(text, str) or "://" not in text:
        return text if isinstance(text, RemotePath) else Path(text)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    refuse_credentials(text)
    url = text.rstrip("/")
    try:
        fs, path = FileSystem.from_uri(url)
    except pa.ArrowInvalid as error:
        try:
            from fsspec.core import url_to_fs

            fsspec, path = url_to_fs(url)
        except (ImportError, ValueError):
            reason = f"a path, or a URL that pyarrow or fsspec knows: s3://bucket/folder ({error})"
            raise ConfigError("store", text, reason) from None
        fs = PyFileSystem(FSSpecHandler(fsspec))
    return RemotePath(url, path, fs)
