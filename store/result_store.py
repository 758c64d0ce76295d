"""Large results beside Redis: in a shared folder or an object store. Off unless SCOREPOOL_RESULT_STORE says where.

A worker writes the object before it records the job's end, and Redis keeps a `wire.StoredResult`. The object's name has
the execution's id, so two workers never write one object. Before it is written, its lease's key is put into the sorted
set `Keys.stored_results`, by the time of its next check: `store/lua/check_stored.lua` finds objects that no job needs,
those of workers that died between the write and the end among them, and the API deletes them.

This module loads no obstore. object_store.py does, and is imported if there is a result store.
"""

import re
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Protocol

from scorepool.store.keys import PREFIX
from scorepool.store.settings import Settings, SettingsError

SCHEMES = ("file", "s3", "gs", "az")
INLINE_BYTES = 2**28  # of a result in Redis, without a result store: Redis takes no string of 512 MiB
INLINE_BYTES_BESIDE_STORE = 2**20
CHECK_AFTER_S = 900  # longer than most writes take; one that takes longer is noted again after it
_ID = re.compile(r"[\w-]{1,128}")


class ResultStoreError(Exception):
    """The result store did not do what it was asked for. The message is the end of a sentence."""


class ResultMissing(ResultStoreError):
    """There is no such object."""


class ResultStore(Protocol):
    """Objects by their path. Any thread may use it."""

    def put(self, path: str, body: bytes) -> None:
        """Write an object, whole or not at all. Raises ResultStoreError."""

    def get(self, path: str) -> bytes:
        """Read an object. Raises ResultStoreError, ResultMissing."""

    async def open(self, path: str) -> tuple[int, AsyncIterator[bytes]]:
        """Return an object's size, and its bytes in chunks. Both raise ResultStoreError, the first ResultMissing."""

    async def delete(self, path: str) -> None:
        """Delete an object, and what a broken write of it left. It may be absent. Raises ResultStoreError."""


def open_result_store(settings: Settings) -> ResultStore | None:
    """Return the result store of this process, without a connection to it; None if there is none.

    Raises SettingsError.
    """
    url = settings.result_store
    if not url:
        return None
    if url.partition("://")[0] not in SCHEMES:
        names = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise SettingsError(f"SCOREPOOL_RESULT_STORE={url[:100]!r}: expected a URL that begins with {names}")
    try:
        module = import_module("scorepool.store.object_store")
    except ImportError as error:
        raise SettingsError(
            f"SCOREPOOL_RESULT_STORE={url[:100]!r} needs a package that is not installed ({error.name}): run `pip "
            "install 'scorepool[objects]'`"
        ) from None
    found: ResultStore = module.ObjectStore(url)
    return found


def inline_result_bytes(settings: Settings) -> int:
    """Return the most bytes of a result that Redis holds."""
    return settings.max_inline_result_bytes or (INLINE_BYTES_BESIDE_STORE if settings.result_store else INLINE_BYTES)


def object_path(job_id: str, execution: str) -> str:
    """Return the path of a result's object in the store. The ids come from Redis. Raises ValueError for others."""
    if not (_ID.fullmatch(job_id) and _ID.fullmatch(execution)):
        raise ValueError("the ids of a stored result are no ids")
    return f"{PREFIX}/{job_id[:2]}/{job_id}-{execution}"


def path_of_lease(lease_key: str) -> str:
    """Return the path of the object that the holder of a lease writes. Raises ValueError."""
    job_id, _, execution = lease_key.partition(":")
    return object_path(job_id, execution)
