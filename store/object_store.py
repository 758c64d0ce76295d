"""The result store by obstore: a folder, or an object store whose credentials its own variables hold (AWS_*, ...)."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from scorepool.store.limited_calls import LimitedCalls
from scorepool.store.result_store import ResultMissing, ResultStoreError
from scorepool.store.settings import SettingsError

T = TypeVar("T")
TIMEOUT_S = 300  # of one write or deletion, with its repetitions
READ_TIMEOUT_S = 30  # of one chunk of an object of a server
MAX_READ_S = 86_400  # of a whole object: the API reads it as fast as its client does; obstore's own limit is 30 s
GET_TIMEOUT_S = 120  # of one that a worker reads, on a thread whose worker ends if it takes 300 s
# Of one chunk of a file: a share may hang, and obstore 0.12 waits for ever for the rest of a file that became shorter.
FOLDER_TIMEOUT_S = 30
FOLDER_BYTES_PER_S = 2**20  # of a share that is slow: a file that is written or read as a whole takes so much longer
CONNECT_TIMEOUT_S = 10
MAX_RETRIES = 2  # of one request; the worker and the API try again
CHUNK_BYTES = 2**20
MAX_REASON = 300  # characters
_SPACES = re.compile(r"\s+")


class ObjectStore:
    """Objects below a URL."""

    def __init__(self, url: str) -> None:
        """Raises SettingsError if the URL cannot be one of a store, or is a folder that does not exist."""
        place = f"SCOREPOOL_RESULT_STORE={url[:100]!r}"
        try:
            parts = urlsplit(url)
        except ValueError as error:  # brackets that enclose no IPv6 address
            raise SettingsError(f"{place}: {error}") from None
        self._folder = Path(unquote(parts.path)) if parts.scheme == "file" else None
        if self._folder is not None and (parts.netloc not in ("", "localhost") or not self._folder.is_dir()):
            raise SettingsError(f"{place}: expected the URL of a folder that exists, such as file:///Volumes/results")
        self._calls = LimitedCalls()
        self._mount_point = None if self._folder is None else _mount_point(self._folder)
        try:
            if self._folder is not None:
                self._store: Any = LocalStore(self._folder)
                self._reader: Any = self._store
            else:
                self._store = _client(url, timeout_s=TIMEOUT_S, read_timeout_s=TIMEOUT_S)
                self._reader = _client(url, timeout_s=MAX_READ_S, read_timeout_s=READ_TIMEOUT_S)
        except (BaseError, OSError, ValueError) as error:
            raise SettingsError(f"{place}: {_reason(error)}") from None

    def put(self, path: str, body: bytes) -> None:
        """Write an object, whole or not at all. Raises ResultStoreError."""
        if self._folder is None:  # whose client ends by itself
            self._put(path, body)
            return
        undo = partial(obstore.delete, self._store, path)  # a write that ends too late: no job would name its object
        self._limited(lambda: self._put(path, body), _folder_s(len(body)), undo)

    def _put(self, path: str, body: bytes) -> None:
        if self._is_folder_gone():
            raise self._mapped(FileNotFoundError())  # obstore would make it anew, on the disk of this machine
        try:
            obstore.put(self._store, path, body, use_multipart=False)
        except (BaseError, OSError) as error:
            raise ResultStoreError(_reason(error)) from None

    def get(self, path: str) -> bytes:
        """Read an object. Raises ResultStoreError, ResultMissing."""
        begin_s = GET_TIMEOUT_S if self._folder is None else FOLDER_TIMEOUT_S
        found = self._limited(lambda: self._read(lambda: obstore.get(self._reader, path)), begin_s)
        rest_s = min(GET_TIMEOUT_S, _folder_s(found.meta["size"]))
        return self._limited(lambda: self._read(lambda: bytes(found.bytes())), rest_s)

    def _read(self, reading: Callable[[], T]) -> T:
        try:
            return reading()
        except (BaseError, OSError) as error:
            raise self._mapped(error) from None

    def _limited(self, call: Callable[[], T], timeout_s: float, undo: Callable[[], object] = lambda: None) -> T:
        """Make a call; `undo` it if it ends too late. Raises ResultStoreError."""
        try:
            return self._calls.run(call, timeout_s, undo)
        except TimeoutError:
            name = "the server" if self._folder is None else f"the folder {self._folder}"
            raise ResultStoreError(f"{name} does not answer") from None

    async def open(self, path: str) -> tuple[int, AsyncIterator[bytes]]:
        """Return an object's size, and its bytes in chunks. Both raise ResultStoreError, the first ResultMissing."""
        found = await self._try(lambda: self._in_time(obstore.get_async(self._reader, path)))
        return found.meta["size"], self._chunks(found)

    async def _chunks(self, found: Any) -> AsyncIterator[bytes]:
        stream = found.stream(min_chunk_size=CHUNK_BYTES)
        try:
            while True:
                yield bytes(await self._in_time(anext(stream)))
        except StopAsyncIteration:
            return
        except (BaseError, OSError) as error:
            raise self._mapped(error) from None

    async def _in_time(self, reading: Awaitable[T]) -> T:
        """Wait for what is read of a folder as long as it may take; of other stores, which end by themselves, for ever.

        Raises ResultStoreError.
        """
        try:
            return await asyncio.wait_for(reading, None if self._folder is None else FOLDER_TIMEOUT_S)
        except TimeoutError:
            raise ResultStoreError(f"the folder {self._folder} has not answered for {FOLDER_TIMEOUT_S:g} s") from None

    async def delete(self, path: str) -> None:
        """Delete an object, and what a broken write of it left. It may be absent. Raises ResultStoreError."""
        with suppress(ResultMissing):
            await self._try(lambda: obstore.delete_async(self._store, path))
        if self._folder is not None:
            with suppress(OSError):  # a process that was killed leaves the file that would have been renamed
                os.unlink(self._folder / f"{path}#1")

    async def _try(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            return await call()
        except (BaseError, OSError) as error:
            raise self._mapped(error) from None

    def _mapped(self, error: Exception) -> ResultStoreError:
        if not isinstance(error, FileNotFoundError):
            return ResultStoreError(_reason(error))
        if self._is_folder_gone():
            return ResultStoreError(f"the folder {self._folder} is not there")
        return ResultMissing("it has no such object")

    def _is_folder_gone(self) -> bool:
        """True if the folder has vanished, such as a share that is not mounted: nothing in it is lost.

        A share that was unmounted may leave its folder, empty and on the disk of this machine.
        """
        if self._folder is None or self._mount_point is None:
            return False
        return not (self._folder.is_dir() and self._mount_point.is_mount())


def _folder_s(num_bytes: int) -> float:
    """Return how long a file of so many bytes may take."""
    return FOLDER_TIMEOUT_S + num_bytes / FOLDER_BYTES_PER_S


def _client(url: str, timeout_s: float, read_timeout_s: float) -> Any:
    """Return obstore's client of an object store. Raises BaseError, OSError, ValueError."""
    return from_url(
        url,
        client_options={
            "timeout": timedelta(seconds=timeout_s),
            "read_timeout": timedelta(seconds=read_timeout_s),
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
            "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true",
        },
        retry_config={"max_retries": MAX_RETRIES, "retry_timeout": timedelta(seconds=TIMEOUT_S)},
    )


def _mount_point(folder: Path) -> Path:
    """Return where the file system of a folder is mounted."""
    path = folder.resolve()
    return next((each for each in (path, *path.parents) if each.is_mount()), Path(path.anchor))


def _reason(error: Exception) -> str:
    """Return the first paragraph of obstore's text, which is followed by a dump of its source."""
    text = _SPACES.sub(" ", str(error).partition("Debug source")[0]).strip()
    return f"{text[:MAX_REASON]}..." if len(text) > MAX_REASON else text or type(error).__name__
