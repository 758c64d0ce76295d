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
        if self._read_at < 0:
            await self.live()
        return self._clock.now_s()

    async def serving(self, names: Iterable[str]) -> dict[str, list[wire.ServedModel]]:
        """Return what serves each name or alias, or served it recently. All entries of one name are of one model.

        They are read again at most once: when they are older than FRESH_S, or when a name is not among them, because
        its worker may just have started.
        """
        wanted = set(names)
        known = {name for model in (*self._live, *self._recent) for name in (model.id, *model.aliases)}
        await self._shared.since(clock_s() if not wanted <= known else clock_s() - FRESH_S)
        return {name: self._named(name) for name in wanted}

    async def find(self, name: str | None) -> wire.ServedModel:
        """Return what serves the name, or the only served model if None. Raises ModelNotServed, BadRequest."""
        if name is None:
            await self.live()
            names = self.names or sorted(model.id for model in self._recent)
            if len(names) > 1:
                raise BadRequest(f"model: several are served, so name one of {', '.join(names)}", "model")
            name = names[0] if names else ""
        served = (await self.serving([name]))[name]
        if not served:
            raise self.not_served(name)
        return served[0]

    async def is_live(self, name: str) -> bool:
        """True if a live worker serves the name or alias now."""
        await self.live()
        return any(name in (model.id, *model.aliases) for model in self._live)

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
        """Return the entries of the live models read last, by each name and then each alias that clients may use."""
        aliases = sorted({alias for model in self._live for alias in model.aliases})
        return {name: _entries_of(name, self._live) for name in (*self.names, *aliases)}

    def resolve_aliases(self, requests: Sequence[wire.Request]) -> list[wire.Request]:
        """Replace aliases by the models' own names, whose queues their workers drain first, by the models read last."""
        models = (*self._live, *self._recent)
        own_names = {alias: self._named(alias)[0].id for model in models for alias in model.aliases}
        return [
            replace(request, model=own_names[request.model]) if request.model in own_names else request
            for request in requests
        ]

    def not_served(self, name: str, field: str = "model") -> ModelNotServed:
        """Build the error for a model that no worker serves, with the names and aliases that can be asked for."""
        names = [name for model in self.names for name in (model, *self._aliases(model))]
        served = f"live models: {', '.join(names)}" if names else "no worker is live"
        return ModelNotServed(
            f"{field}: no live worker serves {name[:128]!r}; {served}. "
            "A job of POST /v1/jobs may be queued anyway, with wait_for_model: true",
            field,
        )

    def _aliases(self, name: str) -> list[str]:
        """Return the other names of a live model."""
        return sorted({alias for model in self._live if model.id == name for alias in model.aliases})

    @property
    def names(self) -> list[str]:
        """Return the names of the live models read last, without aliases."""
        return sorted({model.id for model in self._live})


def _entries_of(name: str, models: Sequence[wire.ServedModel]) -> list[wire.ServedModel]:
    """Return the entries of the one model that a name stands for. `models` is ordered by the models' own names.

    A model's own name comes before another model's alias; of two models with one alias, the first is meant.
    """
    ids = [model.id for model in models if name == model.id] or [model.id for model in models if name in model.aliases]
    return [model for model in models if ids and model.id == ids[0]]
