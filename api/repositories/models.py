"""Read which models are served, from the ServedModel that every worker keeps in Redis."""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace
from redis.asyncio import Redis

from scorepool import store, wire
from scorepool.api.http.errors import BadRequest, ModelNotServed
from scorepool.api.repositories import decode
from scorepool.api.repositories.shared_read import SharedRead
from scorepool.store.clock import RedisClock, clock_s

FRESH_S = 1.0  # how long the models read last are used again


class Models:
    """Answer which models are served, by name or alias.

    A live worker's entry expires with the worker, by Redis's clock. A worker that a crosscheck has stopped is listed
    but serves nothing. A recent model has no worker that serves it now, but had one within SCOREPOOL_MODEL_GRACE_S:
    requests for it are accepted and wait for a worker.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._live: list[wire.ServedModel] = []  # of the workers that take jobs
        self._recent: list[wire.ServedModel] = []
        self._read_at = float("-inf")
        self._shared = SharedRead(self._read)
        self._clock = RedisClock()

    async def live(self) -> list[wire.ServedModel]:
        """Return what each live worker serves, stopped ones included, ordered by model, then by worker.

        It is read at most once in FRESH_S, however many clients ask.
        """
        return await self._shared.since(clock_s() - FRESH_S)

    async def read_now(self) -> list[wire.ServedModel]:
        """Return what each live worker serves now, as `live` does."""
        return await self._shared.since(clock_s())

    @property
    def recent(self) -> Sequence[wire.ServedModel]:
        """Return the recent models that were read last."""
        return self._recent

    @property
    def was_read(self) -> bool:
        """True if the models were read once."""
        return self._read_at >= 0

    async def _read(self) -> list[wire.ServedModel]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            pipeline.time()
            pipeline.zrange(store.Keys.models, 0, -1)
            pipeline.zrange(store.Keys.recent_models, 0, -1)
            asked_at = clock_s()
            time, *found = await decode.execute(pipeline)
        self._clock.take(time, asked_at)
        workers, models = [[decode.text(name) for name in names or ()] for names in found]
        keys = [*map(store.Keys.served_model, workers), *map(store.Keys.recent_model, models)]
        packed: Any = await self._redis.mget(keys) if keys else []
        served = [decode.message(value, wire.ServedModel) for value in packed]
        live = sorted(filter(None, served[: len(workers)]), key=lambda model: (model.id, model.worker))
        self._live = [model for model in live if model.takes_jobs]
        names = {model.id for model in self._live}
        recent = [model for model in served[len(workers) :] if model and model.id not in names]
        self._recent = sorted(recent, key=lambda model: model.id)
        self._read_at = clock_s()
        return live

    async def now_s(self) -> float:
        """Return the unix time of Redis's clock. It is measured when models are read, so mostly without a command."""
        if not self.was_read:
            await self.live()
        return self._clock.now_s()

    async def serving(self, names: Iterable[str]) -> dict[str, list[wire.ServedModel]]:
        """Return what serves each name or alias, or served it recently. All entries of one name are of one model.

        They are read again at most once: when they are older than FRESH_S, or when a name is not among them, because
        its worker may just have started.
        """
        wanted = set(names)
        known = {name for model in (*self._live, *self._recent) for name in model.names}
        await self._shared.since(clock_s() if not wanted <= known else clock_s() - FRESH_S)
        return {name: self._named(name) for name in wanted}

    async def unreachable(self, names: Iterable[str]) -> dict[str, int]:
        """Return those of these names that a server may serve which does not answer, each with the server's index.

        `serving` raises RedisError for them. It uses what was read in the last FRESH_S.
        """
        return {}

    async def find(self, name: str | None) -> wire.ServedModel:
        """Return what serves the name, or the only served model if None. Raises ModelNotServed, BadRequest.

        That of an adapter has the adapter's name, which `resolve_names` replaces.
        """
        if name is None:
            await self.live()
            names = self.names or sorted(model.id for model in self._recent)
            if len(names) > 1:
                raise BadRequest(f"model: several are served, so name one of {', '.join(names)}", "model")
            name = names[0] if names else ""
        served = (await self.serving([name]))[name]
        if not served:
            raise self.not_served(name)
        is_adapter = name not in (served[0].id, *served[0].aliases)
        return replace(served[0], id=name) if is_adapter else served[0]

    async def find_base(self, name: str | None) -> wire.ServedModel:
        """Return the live model of a name or alias, or the only one if None. Raises ModelNotServed, BadRequest."""
        found = await self.find(name)
        if not await self.is_live(found.id):
            raise self.not_served(name or found.id)
        return found

    async def workers_of(self, model: str) -> list[wire.ServedModel]:
        """Return the live workers of a model by its own name, as they are now."""
        return [each for each in await self.read_now() if each.id == model and each.takes_jobs]

    async def is_live(self, name: str) -> bool:
        """True if a live worker serves the name or alias now."""
        await self.live()
        return any(name in (model.id, *model.aliases) for model in self._live)

    def check_adapter(self, request: wire.Request, served: Sequence[wire.ServedModel], where: str) -> None:
        """Check that all entries of the request's model have the adapter that it names. Raises ModelNotServed."""
        if request.adapter is None or not served:
            return
        missing = next((model for model in served if request.adapter not in model.adapter_names), None)
        if missing is not None:
            names = sorted(set.intersection(*(set(model.adapter_names) for model in served)))
            raise ModelNotServed(
                f"{where}adapter: the worker {missing.worker} of {missing.id!r} has no adapter {request.adapter!r}; "
                f"adapters of all its workers: {', '.join(names) or 'none'}",
                f"{where}adapter",
            )
        if request.model in served[0].adapter_names and request.model != request.adapter:
            raise BadRequest(
                f"{where}adapter: `model` names the adapter {request.model!r}, expected no other one, found "
                f"{request.adapter!r}",
                f"{where}adapter",
            )

    def check_not_partial(self, name: str, where: str) -> None:
        """Raise ModelNotServed for an adapter that some workers of a live model have.

        Its jobs would wait for ever in a queue that is named after the adapter, which no worker reads.
        """
        having = next((model for model in self._live if name in model.adapter_names), None)
        if having is None or _entries_of(name, self._live):
            return
        missing = next(model for model in self._live if model.id == having.id and name not in model.adapter_names)
        raise ModelNotServed(
            f"{where}model: the worker {missing.worker} of {missing.id!r} has no adapter {name!r}, which others have: "
            "load it on all of them",
            f"{where}model",
        )

    async def close(self) -> None:
        """End a read that is under way."""
        await self._shared.close()

    def _named(self, name: str) -> list[wire.ServedModel]:
        """Return the entries of one model for a name, live ones before recent ones."""
        return _entries_of(name, self._live) or _entries_of(name, self._recent)

    def context_lengths(self) -> dict[str, int]:
        """Return the longest context of each live or recent model by its own name, by the models read last."""
        found: dict[str, int] = {}
        for model in (*self._recent, *self._live):
            found[model.id] = max(model.context_length, found.get(model.id, 0))
        return found

    def live_by_name(self) -> dict[str, list[wire.ServedModel]]:
        """Return the entries of the live models read last, by each name that clients may use."""
        aliases = sorted({alias for model in self._live for alias in model.aliases})
        adapters = sorted({name for model in self._live for name in model.adapter_names})
        found = {name: _entries_of(name, self._live) for name in (*self.names, *aliases, *adapters)}
        return {name: entries for name, entries in found.items() if entries}

    def resolve_names(self, requests: Sequence[wire.Request]) -> list[wire.Request]:
        """Replace aliases and adapters' names by the models' own names, by the models read last.

        Their workers drain the queues of these names.
        """
        return [self._resolve_name(request) for request in requests]

    def _resolve_name(self, request: wire.Request) -> wire.Request:
        served = self._named(request.model)
        if not served or served[0].id == request.model:
            return request
        if request.model in served[0].aliases:
            return replace(request, model=served[0].id)
        return replace(request, model=served[0].id, adapter=request.model)

    def not_served(self, name: str, field: str = "model") -> ModelNotServed:
        """Build the error for a model that no worker serves, with the names and aliases that can be asked for."""
        names = [name for model in self.names for name in (model, *self._aliases(model), *self._adapters(model))]
        served = f"live models: {', '.join(names)}" if names else "no worker is live"
        return ModelNotServed(
            f"{field}: no live worker serves {name[:128]!r}; {served}. "
            "A job of POST /v1/jobs may be queued anyway, with wait_for_model: true",
            field,
        )

    def _aliases(self, name: str) -> list[str]:
        """Return the other names of a live model."""
        return sorted({alias for model in self._live if model.id == name for alias in model.aliases})

    def _adapters(self, name: str) -> list[str]:
        """Return the adapters that all workers of a live model have."""
        found = [set(model.adapter_names) for model in self._live if model.id == name]
        return sorted(set.intersection(*found)) if found else []

    @property
    def names(self) -> list[str]:
        """Return the names of the live models read last, without aliases."""
        return sorted({model.id for model in self._live})


def _entries_of(name: str, models: Sequence[wire.ServedModel]) -> list[wire.ServedModel]:
    """Return the entries of the one model that a name stands for. `models` is ordered by the models' own names.

    A model's own name comes before another model's alias, and both before an adapter's name; of two models with one
    alias, the first is meant. An adapter is served only if all workers of its model have it: they share the queue.
    """
    ids = [model.id for model in models if name == model.id] or [model.id for model in models if name in model.aliases]
    if ids:
        return [model for model in models if model.id == ids[0]]
    for base in dict.fromkeys(model.id for model in models if name in model.adapter_names):
        entries = [model for model in models if model.id == base]
        if all(name in model.adapter_names for model in entries):
            return entries
    return []
