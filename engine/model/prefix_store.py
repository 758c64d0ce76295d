"""Keep computed prefixes in files, so that a prompt is not computed again after a restart.

    folder/<identity>/<number of tokens>-<digest of the tokens>-<CRC-32 of the file>.safetensors

The identity is a digest of all that decides about the numbers, so caches of other weights, dtypes or versions are never
found. A file that is damaged, cut off or gone is a miss. Files beyond `max_bytes` are removed, the least recently used
first, whoever wrote them: workers of one machine may share a folder.

A file is written by the thread that owns the arrays, and checked and renamed by another one. Knows no scheduler.
"""

import hashlib
import logging
import os
import re
import zlib
from array import array
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

from scorepool.engine.model import kv_cache
from scorepool.engine.scheduling.prefix_cache import Prefix

CHUNK_BYTES = 2**22  # of a file, read at a time
_ITEM = 4  # bytes of a packed token
_NAME = re.compile(r"(\d{1,9})-([0-9a-f]{32})-([0-9a-f]{8})\.safetensors")
log = logging.getLogger(__name__)


class PrefixStore:
    """The files of one folder. Use it on the MLX thread, but for what it does on a thread of its own."""

    def __init__(self, folder: Path, max_bytes: int, identity: str, kinds: list[object]) -> None:
        """Open a folder, which is made if it is missing. Raises OSError.

        identity  what decides about the numbers of the model
        kinds     the kind of each layer's cache, see kv_cache.py
        """
        self._all = folder
        self._folder = folder / hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._max_bytes = max_bytes
        self._kinds = kinds
        self._lock = Lock()  # guards the index
        self._index: dict[int, dict[str, Path]] = {}  # by length and digest
        for path in sorted(self._folder.iterdir()):
            if match := _NAME.fullmatch(path.name):
                self._index.setdefault(int(match[1]), {})[match[2]] = path
        self.num_bytes = self._count_bytes()  # of the files of all models, when it was looked last
        self.num_evicted = 0  # files that were removed to make room
        self._written: SimpleQueue[tuple[Path, int] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="prefix-store", daemon=True)
        self._thread.start()

    def longest(self, token_ids: list[int]) -> int:
        """Return the length of the longest stored beginning of these tokens; 0 if there is none."""
        packed = memoryview(array("i", token_ids).tobytes())
        with self._lock:
            for length in sorted((length for length in self._index if length <= len(token_ids)), reverse=True):
                if _digest(packed[: length * _ITEM]) in self._index[length]:
                    return length
        return 0

    def load(self, prefix: Prefix) -> bool:
        """Load what sequences continue from. Return False, and remove the file, if it is gone or damaged."""
        digest = _digest_of(prefix)
        with self._lock:
            path = self._index.get(prefix.length, {}).get(digest)
        if path is None:
            return False
        try:
            if not path.name.endswith(f"-{_crc32(path):08x}.safetensors"):
                raise ValueError("its checksum is wrong")
            cache, last_hidden = kv_cache.load(path, self._kinds)
            os.utime(path)
        except Exception as error:  # any: whatever is wrong with the file, the prompt is computed
            log.warning("%s is ignored: %s: %s", path, type(error).__name__, error)
            self._forget(prefix.length, digest)
            path.unlink(missing_ok=True)
            return False
        prefix.cache, prefix.last_hidden, prefix.num_bytes = cache, last_hidden, kv_cache.num_bytes(cache)
        return True

    def save(self, prefix: Prefix) -> None:
        """Write what sequences continue from. A disk that is full is logged."""
        path = self._folder / f"{prefix.length}-{_digest_of(prefix)}.{os.getpid()}.safetensors"
        try:
            kv_cache.save(path, prefix.cache, prefix.last_hidden)
        except (OSError, RuntimeError) as error:  # mlx raises RuntimeError
            log.warning("%s cannot be written: %s", path, error)
            path.unlink(missing_ok=True)
            return
        self._written.put((path, prefix.length))

    def close(self) -> None:
        """Finish the files that were written, and end the thread."""
        self._written.put(None)
        self._thread.join()

    def _forget(self, length: int, digest: str) -> None:
        with self._lock:
            found = self._index.get(length, {})
            found.pop(digest, None)
            if not found:
                self._index.pop(length, None)

    def _run(self) -> None:
        """Name the files that were written by their checksums, and remove the oldest."""
        while (written := self._written.get()) is not None:
            unnamed, length = written
            digest = unnamed.name.split(".")[0].partition("-")[2]
            try:
                path = unnamed.rename(unnamed.with_name(f"{length}-{digest}-{_crc32(unnamed):08x}.safetensors"))
                with self._lock:
                    self._index.setdefault(length, {})[digest] = path
                self._remove_oldest()
            except OSError as error:
                log.warning("%s cannot be kept: %s", unnamed, error)

    def _remove_oldest(self) -> None:
        """Remove the least recently used files beyond `max_bytes`, with those that a process has left unfinished."""
        files = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in self._all.glob("*/*.safetensors"))
        excess = sum(size for _, size, _ in files) - self._max_bytes
        for _, size, path in files:
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size
            self.num_evicted += 1
            if path.parent == self._folder and (match := _NAME.fullmatch(path.name)):
                self._forget(int(match[1]), match[2])
        self.num_bytes = self._max_bytes + excess

    def _count_bytes(self) -> int:
        sizes = []
        for path in self._all.glob("*/*.safetensors"):
            with suppress(OSError):  # another process may remove it
                sizes.append(path.stat().st_size)
        return sum(sizes)


def _digest_of(prefix: Prefix) -> str:
    return _digest(memoryview(array("i", prefix.token_ids).tobytes()))


def _digest(packed: memoryview) -> str:
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value
