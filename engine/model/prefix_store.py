"""Keep computed prefixes in files, so that a prompt is not computed again after a restart.

    folder/<identity>/<number of tokens>-<digest of the tokens>-<CRC-32 of the file>.safetensors

The identity is a digest of all that decides about the numbers, so caches of other weights, dtypes or versions are never
found. A file that is damaged, cut off, another's or gone is a miss: see prefix_file.py. Files beyond `max_bytes` are
removed, the least recently used first, whoever wrote them: workers of one machine may share a folder.

A file is written by the thread that owns the arrays, and checked and renamed by another one. Knows no scheduler.
"""

import hashlib
import logging
import os
import re
import secrets
import stat
from array import array
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

from scorepool.engine.model import kv_cache, prefix_file
from scorepool.engine.model.prefix_file import Layout
from scorepool.engine.scheduling.prefix_cache import Prefix

MAX_UNNAMED_SHARE = 8  # files that wait for their names have an eighth of the room, or are one
_ITEM = 4  # bytes of a packed token
_DIGEST_BYTES = 16
_NAME = re.compile(r"(\d{1,9})-([0-9a-f]{32})-([0-9a-f]{8})\.safetensors")
log = logging.getLogger(__name__)


class PrefixStore:
    """The files of one folder. Use it on the MLX thread, but for what it does on a thread of its own."""

    def __init__(self, folder: Path, max_bytes: int, identity: str, layout: Layout) -> None:
        """Open a folder, which is made if it is missing. Raises OSError.

        identity  what decides about the numbers of the model
        layout    of the model's prefixes, see prefix_file.layout_of
        """
        self._all = folder
        self._identity = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        self._folder = folder / self._identity
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._max_bytes = max_bytes
        self._layout = layout
        self._lock = Lock()  # guards the index, and `_unnamed_bytes`
        self._index: dict[int, dict[str, Path]] = {}  # by length and digest
        for path in sorted(self._folder.iterdir()):
            if match := _NAME.fullmatch(path.name):
                self._index.setdefault(int(match[1]), {})[match[2]] = path
        self.num_bytes = sum(size for _, size, _ in self._files())  # of all models, when it was looked last
        self.num_evicted = 0  # files that were removed to make room
        self._unnamed_bytes = 0  # of files that wait for their names
        self._written: SimpleQueue[tuple[Path, int, int] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="prefix-store", daemon=True)
        self._thread.start()

    def longest(self, token_ids: list[int]) -> int:
        """Return the length of the longest stored beginning of these tokens; 0 if there is none."""
        packed = memoryview(array("i", token_ids).tobytes())
        digest, start, longest = hashlib.blake2b(digest_size=_DIGEST_BYTES), 0, 0
        with self._lock:
            for length in sorted(length for length in self._index if length <= len(token_ids)):
                digest.update(packed[start * _ITEM : length * _ITEM])
                start = length
                if digest.copy().hexdigest() in self._index[length]:
                    longest = length
        return longest

    def load(self, prefix: Prefix) -> bool:
        """Load what sequences continue from. Return False, and remove the file, if it is gone or damaged."""
        digest = _digest_of(prefix)
        with self._lock:
            path = self._index.get(prefix.length, {}).get(digest)
        if path is None:
            return False
        try:
            if not path.name.endswith(f"-{prefix_file.checksum(path, self._max_bytes):08x}.safetensors"):
                raise ValueError("its checksum is wrong")
            cache, last_hidden = prefix_file.load(path, prefix.length, self._layout, self._says(digest))
        except Exception as error:  # any: whatever is wrong with the file, the prompt is computed
            level = logging.DEBUG if isinstance(error, FileNotFoundError) else logging.WARNING  # another made room
            log.log(level, "%s is ignored: %s: %s", path, type(error).__name__, error)
            self._forget(prefix.length, digest)
            _remove(path)
            return False
        with suppress(OSError):  # in a folder that cannot be written to
            os.utime(path)
        prefix.cache, prefix.last_hidden, prefix.num_bytes = cache, last_hidden, kv_cache.num_bytes(cache)
        return True

    def save(self, prefix: Prefix) -> bool:
        """Write what sequences continue from; a full disk is logged. Return False if too many files wait for names."""
        if prefix.num_bytes > self._max_bytes:
            return True
        with self._lock:
            if self._unnamed_bytes > self._max_bytes // MAX_UNNAMED_SHARE:
                return False
            self._unnamed_bytes += prefix.num_bytes
        digest = _digest_of(prefix)
        path = self._folder / f"{prefix.length}-{digest}.{secrets.token_hex(4)}.safetensors"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it may have been removed
            prefix_file.save(path, prefix.cache, prefix.last_hidden, self._says(digest))
        except (OSError, RuntimeError) as error:  # mlx raises RuntimeError
            log.warning("%s cannot be written: %s", path, error)
            _remove(path)
            self._note_named(prefix.num_bytes)
            return True
        self._written.put((path, prefix.length, prefix.num_bytes))
        return True

    def close(self) -> None:
        """Finish the files that were written, and end the thread. A folder without files is removed."""
        self._written.put(None)
        self._thread.join()
        _remove_if_empty(self._folder)

    def _forget(self, length: int, digest: str) -> None:
        with self._lock:
            found = self._index.get(length, {})
            found.pop(digest, None)
            if not found:
                self._index.pop(length, None)

    def _says(self, digest: str) -> dict[str, str]:
        """Return what a file of the model says of itself, so that one with another's name is found out."""
        return {"identity": self._identity, "tokens": digest}

    def _run(self) -> None:
        """Remove the oldest files, and name those that were written by their checksums."""
        self._remove_oldest()  # the last process may have had more room
        while (written := self._written.get()) is not None:
            unnamed, length, num_bytes = written
            digest = unnamed.name.split(".")[0].partition("-")[2]
            try:
                found = prefix_file.checksum(unnamed, 2 * self._max_bytes)
                path = unnamed.rename(unnamed.with_name(f"{length}-{digest}-{found:08x}.safetensors"))
                with self._lock:
                    self._index.setdefault(length, {})[digest] = path
            except FileNotFoundError:
                log.debug("%s has made room before it had a name", unnamed)
            except (OSError, ValueError) as error:
                log.warning("%s cannot be kept: %s", unnamed, error)
                _remove(unnamed)
            self._remove_oldest()
            self._note_named(num_bytes)

    def _note_named(self, num_bytes: int) -> None:
        with self._lock:
            self._unnamed_bytes -= num_bytes

    def _remove_oldest(self) -> None:
        """Remove the least recently used files beyond `max_bytes`, with those that a process has left unfinished."""
        files = sorted(self._files())
        excess = sum(size for _, size, _ in files) - self._max_bytes
        for _, size, path in files:
            if excess <= 0:
                break
            if not _remove(path):
                continue
            excess -= size
            self.num_evicted += 1
            if path.parent != self._folder:
                _remove_if_empty(path.parent)
            elif match := _NAME.fullmatch(path.name):
                self._forget(int(match[1]), match[2])
        self.num_bytes = self._max_bytes + excess

    def _files(self) -> list[tuple[float, int, Path]]:
        """Return time of the last use, size and path of the files of all models."""
        found = []
        with suppress(OSError):  # the folder may vanish meanwhile
            for path in self._all.glob("*/*.safetensors"):
                with suppress(FileNotFoundError):  # another process may remove it
                    status = path.lstat()
                    if not stat.S_ISDIR(status.st_mode):
                        found.append((status.st_mtime, status.st_size, path))
        return found


def _remove(path: Path) -> bool:
    """Remove a file; return False if it cannot be: the folder is not ours, or it is a folder itself."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # it has files, or is gone
        folder.rmdir()


def _digest_of(prefix: Prefix) -> str:
    return _digest(memoryview(array("i", prefix.token_ids).tobytes()))


def _digest(packed: memoryview) -> str:
    return hashlib.blake2b(packed, digest_size=_DIGEST_BYTES).hexdigest()
