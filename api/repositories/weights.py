"""Push versions of a model's weights, and show them. See store/weights.py for how workers move."""

import asyncio
from collections.abc import AsyncIterable, Callable
from typing import Any
from uuid import uuid4

import msgspec
from msgspec.structs import replace
from redis.asyncio import Redis

from scorepool import store, wire
from scorepool.api.http.errors import BadRequest, Conflict, ModelNotServed
from scorepool.api.repositories import decode
from scorepool.api.repositories.memory import memory_is_short
from scorepool.store.clock import clock_s
from scorepool.store.scripts import load
from scorepool.store.weights import CHUNK_BYTES, UPLOAD_TTL_S, WeightsRecord

MAX_HEADER_BYTES = 100_000_000  # of a safetensors file: its own limit
POLL_S = 0.05  # while a version is loaded


class Weights:
    """The versions of every model's weights."""

    def __init__(self, redis_of: Callable[[str], Redis]) -> None:
        """`redis_of` returns the server of a model, by its own name."""
        self._redis_of = redis_of

    async def push(self, model: str, version: int | None, source: wire.WeightsSource) -> int:
        """Have the workers load a version; return its number. Raises ModelNotServed, Conflict."""
        wanted, source = "" if version is None else str(version), replace(source, id=uuid4().hex)
        args: list[str | bytes] = [model, wanted, wire.encode(source), source.upload or ""]
        answer: Any = await self._redis_of(model).register_script(load("push_weights.lua"))(args=args)
        match answer[0].decode(), answer[1]:
            case "pushed", number:
                return int(number)
            case "pending", number:
                raise Conflict(
                    f"version {number} is being loaded; wait until `pending` of GET /v1/models/{model}/weights is null"
                )
            case "old", number:
                raise BadRequest(
                    f"version: expected more than {number}, the version that serves, found {version}", "version"
                )
            case _:
                raise ModelNotServed(f"model: no live worker serves {model!r}", "model")

    async def upload(self, model: str, chunks: AsyncIterable[bytes]) -> wire.WeightsSource:
        """Keep a safetensors file until its version is replaced. After an error, nothing is left.

        Raises BadRequest, Unavailable.
        """
        upload_id, header = uuid4().hex, SafetensorsHeader()
        redis, key = self._redis_of(model), store.Keys.weights_upload(upload_id)
        num_chunks = num_bytes = 0
        held = bytearray()
        try:
            async for chunk in chunks:
                header.read(chunk)
                held += chunk
                while len(held) >= CHUNK_BYTES:
                    await _write(redis, key, num_chunks, bytes(held[:CHUNK_BYTES]))
                    del held[:CHUNK_BYTES]
                    num_chunks, num_bytes = num_chunks + 1, num_bytes + CHUNK_BYTES
            header.check_size(num_bytes + len(held))
            if held:
                await _write(redis, key, num_chunks, bytes(held))
        except BaseException:
            await asyncio.shield(self.drop(model, upload_id))
            raise
        num_chunks, num_bytes = num_chunks + bool(held), num_bytes + len(held)
        return wire.WeightsSource(upload=upload_id, num_chunks=num_chunks, num_bytes=num_bytes)

    async def drop(self, model: str, upload_id: str) -> None:
        """Delete an upload."""
        await self._redis_of(model).unlink(store.Keys.weights_upload(upload_id))

    async def read(self, model: str) -> wire.WeightsState:
        """Return the versions of a model, and which worker serves which."""
        async with self._redis_of(model).pipeline(transaction=False) as pipeline:
            pipeline.time()
            pipeline.hgetall(store.Keys.weights(model))
            pipeline.zrange(store.Keys.weights_workers(model), 0, -1, withscores=True)
            pipeline.hgetall(store.Keys.weights_moves(model))
            time, fields, live, moves = await decode.execute(pipeline)
        record = WeightsRecord.parse(fields or {})
        now = decode.time_s(time)
        workers = [_worker(name, (moves or {}).get(name)) for name, expires_at in live or () if expires_at > now]
        state = "switching" if any(worker.version < record.version for worker in workers) else "serving"
        return wire.WeightsState(
            model=model,
            state="loading" if record.pending is not None else state,  # type: ignore[arg-type]
            version=record.version,
            label=record.label or (record.source.label if record.source else None),
            fingerprint=record.fingerprint,
            path=record.source.path if record.source else None,
            pending=record.pending,
            failed=record.failed,
            error=record.error,
            workers=sorted(workers, key=lambda worker: worker.worker),
        )

    async def rename(self, model: str, label: str) -> None:
        """Give the version that serves another label."""
        await self._redis_of(model).hset(store.Keys.weights(model), "label", label)

    async def wait(self, model: str, version: int, timeout_s: float) -> wire.WeightsState:
        """Wait until all workers serve a version, at most for `timeout_s`. Raises BadRequest if one refused it."""
        ends_at = clock_s() + timeout_s
        while True:
            state = await self.read(model)
            if state.failed == version:
                raise BadRequest(f"version {version} was refused, version {state.version} serves on: {state.error}")
            is_loading = state.pending == version or (state.version == version and state.state == "switching")
            if not is_loading or clock_s() >= ends_at:
                return state
            await asyncio.sleep(POLL_S)


async def _write(redis: Redis, key: str, number: int, chunk: bytes) -> None:
    if await memory_exceeds(redis, len(chunk), store.MEMORY_FOR_NEW):
        raise memory_is_short()
    async with redis.pipeline() as pipeline:
        pipeline.hset(key, str(number), chunk)
        pipeline.expire(key, UPLOAD_TTL_S)
        await pipeline.execute()


class SafetensorsHeader:
    """The beginning of a safetensors file, as it arrives: it says how long the file is."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._expected_bytes: int | None = None

    def read(self, chunk: bytes) -> None:
        """Take in the next bytes. Raises BadRequest."""
        if self._expected_bytes is not None:
            return
        self._head += chunk
        if len(self._head) < 8:
            return
        length = int.from_bytes(self._head[:8], "little")
        if length > MAX_HEADER_BYTES:
            raise BadRequest("the body is no safetensors file: its header would be longer than 100 MB")
        if len(self._head) >= 8 + length:
            try:
                tensors: dict[str, Any] = msgspec.json.decode(self._head[8 : 8 + length], type=dict[str, Any])
                ends = [int(entry["data_offsets"][1]) for name, entry in tensors.items() if name != "__metadata__"]
            except (msgspec.DecodeError, ValueError, TypeError, KeyError, IndexError) as error:
                raise BadRequest(f"the body is no safetensors file: its header cannot be read: {error}") from None
            self._expected_bytes = 8 + length + max(ends, default=0)
            self._head.clear()

    def check_size(self, num_bytes: int) -> None:
        """Raise BadRequest unless the file has the size that its header says."""
        if self._expected_bytes is None:
            raise BadRequest(f"the body is no safetensors file: after {num_bytes} bytes its header is not complete")
        if num_bytes != self._expected_bytes:
            raise BadRequest(
                f"the body has {num_bytes} bytes, and its safetensors header says {self._expected_bytes}; send the "
                "whole file"
            )


def _worker(name: bytes, move: bytes | None) -> wire.WorkerWeights:
    version, _, since = (move or b"0").decode(errors="replace").partition(" ")
    number = int(version) if version.isdigit() and len(version) <= 16 else 0
    try:
        at = float(since) if number else None
    except ValueError:
        at = None
    return wire.WorkerWeights(worker=decode.text(name), version=number, since=at)


async def memory_exceeds(redis: Redis, num_bytes: int, percent: int) -> bool:
    """True if more than a share of Redis's maxmemory would be in use with so many bytes more."""
    info: Any = await redis.info("memory")
    limit, used = info.get("maxmemory", 0), info.get("used_memory", 0)
    return bool(limit) and (used + num_bytes) * 100 > limit * percent
