"""Load and unload LoRA adapters on all live workers of a model, or on none.

    record `staged` ──► each worker loads, tests and reports ──► all could: record `served` ──► all show it
                                                             └─► one could not: the record before

Records stay in Redis, so that a worker that starts later loads the same (worker/inference/adapter_follower.py).
A staged record holds the one before it: if this process dies meanwhile, workers still know what is served.
"""

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from redis.asyncio import Redis

from scorepool import store, wire
from scorepool.api.http.errors import BadRequest, Conflict, ModelNotServed, Unavailable
from scorepool.api.repositories import decode
from scorepool.api.repositories.models import Models
from scorepool.store.clock import clock_s

POLL_S = 0.1
WAIT_S = 60.0  # for all workers
LOCK_TTL_S = 300


class Adapters:
    """Change the adapters of models. One change of a model at a time."""

    def __init__(self, redis_of: Callable[[str], Redis], models: Models) -> None:
        """`redis_of` returns the server of a model, by its own name."""
        self._redis_of = redis_of
        self._models = models

    async def load(self, body: wire.LoadAdapter) -> None:
        """Load an adapter on all live workers of its model, or on none.

        Raises BadRequest, Conflict, ModelNotServed, Unavailable.
        """
        base = await self._models.find_base(body.model)
        await self._check_name(base.id, body)
        serial, redis = uuid4().hex, self._redis_of(base.id)
        async with _Lock(redis, base.id):
            key, name = store.Keys.adapters(base.id), body.lora_name
            before = await self._in_force(base.id, name)
            staged = wire.AdapterRecord(serial=serial, path=body.lora_path, state="staged", before=before)
            await redis.hset(key, name, wire.encode(staged))
            try:
                fingerprint = await self._until_staged(base.id, serial)
                served = wire.AdapterRecord(serial=serial, path=body.lora_path, state="served")
                await redis.hset(key, name, wire.encode(served))
            except BaseException:
                await _restore(redis, key, name, before)
                raise
            await self._until_shown(base.id, name, fingerprint)

    async def unload(self, body: wire.UnloadAdapter) -> None:
        """Unload an adapter from all live workers of its model. Raises Conflict, ModelNotServed, Unavailable."""
        name = body.lora_name
        base = await self._models.find_base(body.model)
        redis = self._redis_of(base.id)
        async with _Lock(redis, base.id):
            if not any(name in model.adapter_names for model in await self._models.workers_of(base.id)):
                raise ModelNotServed(f"lora_name: no worker of {base.id!r} has an adapter {name!r}", "lora_name")
            record = wire.AdapterRecord(serial=uuid4().hex, path="", state="unloaded")
            await redis.hset(store.Keys.adapters(base.id), name, wire.encode(record))
            await self._until_shown(base.id, name, None)

    async def _check_name(self, base: str, body: wire.LoadAdapter) -> None:
        name = body.lora_name
        served = (await self._models.serving([name]))[name]
        workers = await self._models.workers_of(base)
        has_it = any(name in model.adapter_names for model in workers)
        if served and not (has_it and served[0].id == base and name not in (base, *served[0].aliases)):
            raise BadRequest(
                f"lora_name: {name!r} is the name of another model or adapter, expected a new one", "lora_name"
            )
        if has_it and not body.load_inplace and not await self._is_unloaded(base, name):
            raise BadRequest(
                f"lora_name: the adapter {name!r} is loaded already, expected a new name, or `load_inplace` true to "
                "replace it",
                "lora_name",
            )

    async def _until_staged(self, base: str, serial: str) -> str | None:
        """Wait until all live workers have loaded it; return its fingerprint. Raises BadRequest, Unavailable."""
        deadline = clock_s() + WAIT_S
        while True:
            reports = await self._reports(base, serial)
            workers = [model.worker for model in await self._models.workers_of(base)]
            for worker, report in sorted(reports.items()):
                if report.error is not None:
                    raise BadRequest(f"lora_path: the worker {worker} cannot load it: {report.error}", "lora_path")
            fingerprints = {report.fingerprint for report in reports.values()}
            if len(fingerprints) > 1:
                raise BadRequest(
                    "lora_path: the workers have different adapters in this folder, expected the same on all machines",
                    "lora_path",
                )
            missing = [worker for worker in workers if worker not in reports]
            if workers and not missing:
                return fingerprints.pop()
            if clock_s() > deadline:
                raise Unavailable(
                    f"of the workers of {base!r}, {', '.join(missing) or 'none'} did not answer within {WAIT_S:.0f} s, "
                    "so none serves the adapter"
                )
            await asyncio.sleep(POLL_S)

    async def _until_shown(self, base: str, name: str, fingerprint: str | None) -> None:
        """Wait until all live workers serve the adapter of this fingerprint; none if it is None. Raises Unavailable."""
        deadline = clock_s() + WAIT_S
        while not await self._all_show(base, name, fingerprint):
            if clock_s() > deadline:
                raise Unavailable(f"not all workers of {base!r} have moved within {WAIT_S:.0f} s; they will")
            await asyncio.sleep(POLL_S)

    async def _all_show(self, base: str, name: str, fingerprint: str | None) -> bool:
        workers = await self._models.workers_of(base)
        return bool(workers) and all(_fingerprint(model, name) == fingerprint for model in workers)

    async def _is_unloaded(self, base: str, name: str) -> bool:
        """True if an adapter was unloaded, whatever a worker still shows: a late heartbeat is from before."""
        record = await self._in_force(base, name)
        return record is not None and record.state == "unloaded"

    async def _in_force(self, base: str, name: str) -> wire.AdapterRecord | None:
        """Return the record that says what is served under a name, also after the death of a process that staged."""
        record = decode.message(await self._redis_of(base).hget(store.Keys.adapters(base), name), wire.AdapterRecord)
        return None if record is None else record.in_force

    async def _reports(self, base: str, serial: str) -> dict[str, wire.AdapterReport]:
        """Return the reports about an act, by worker."""
        stored: Any = await self._redis_of(base).hgetall(store.Keys.adapter_reports(base))
        found: dict[str, wire.AdapterReport] = {}
        for field, value in stored.items():
            of, _, worker = decode.text(field).partition(":")
            report = decode.message(value, wire.AdapterReport)
            if of == serial and report is not None:
                found[worker] = report
        return found


async def _restore(redis: Redis, key: str, name: str, before: wire.AdapterRecord | None) -> None:
    if before is None:
        await redis.hdel(key, name)
    else:
        await redis.hset(key, name, wire.encode(before))


def _fingerprint(model: wire.ServedModel, name: str) -> str | None:
    return next((adapter.fingerprint for adapter in model.adapters if adapter.name == name), None)


class _Lock:
    """One change of a model's adapters at a time."""

    def __init__(self, redis: Redis, model: str) -> None:
        self._redis = redis
        self._model = model

    async def __aenter__(self) -> None:
        if not await self._redis.set(store.Keys.adapters_lock(self._model), "1", nx=True, ex=LOCK_TTL_S):
            raise Conflict(f"another adapter of {self._model!r} is being loaded or unloaded; try again when it is done")

    async def __aexit__(self, *_: object) -> None:
        await self._redis.delete(store.Keys.adapters_lock(self._model))
