"""Read which models are served, from the ServedModel that every live worker keeps in Redis."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace
from redis.asyncio import Redis

from scorepool import store, wire
from scorepool.api.http.errors import BadRequest, ModelNotServed
from scorepool.api.repositories import decode

FRESH_S = 1.0  # how long the models read last are used again


class Models:
    """Answer which workers serve a name or an alias. An entry expires with its worker, by Redis's clock."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._live: list[wire.ServedModel] = []
        self._read_at = float("-inf")

    async def live(self) -> list[wire.ServedModel]:
        """Read what each live worker serves, ordered by model, then by worker."""
        names: Any = await self._redis.zrange(store.Keys.models, 0, -1)
        packed: Any = await self._redis.mget([store.Keys.card(decode.text(name)) for name in names]) if names else []
        served = [decode.message(value, wire.ServedModel) for value in packed]
        self._live = sorted((model for model in served if model), key=lambda model: (model.id, model.worker))
        self._read_at = time.monotonic()
        return self._live

    async def serving(self, names: Iterable[str]) -> dict[str, list[wire.ServedModel]]:
        """Return what serves each name or alias. All that serve one alias are workers of one model.

        They are read again at most once: when they are older than FRESH_S, or when a name is not among them, because
        its worker may just have started.
        """
        wanted = set(names)
        known = {name for model in self._live for name in (model.id, *model.aliases)}
        if time.monotonic() - self._read_at > FRESH_S or not wanted <= known:
            await self.live()
        return {name: self._named(name) for name in wanted}

    async def find(self, name: str | None) -> wire.ServedModel:
        """Return what serves the name, or the only served model if None. Raises ModelNotServed, BadRequest."""
        if name is None:
            await self.live()
            names = self.names
            if len(names) > 1:
                raise BadRequest(f"model: several are served, so name one of {', '.join(names)}", "model")
            name = names[0] if names else ""
        served = (await self.serving([name]))[name]
        if not served:
            raise self.not_served(name)
        return served[0]

    def _named(self, name: str) -> list[wire.ServedModel]:
        """Return what serves a name. A model's own name comes before aliases; of two models with one alias, the first
        in alphabetical order has it."""
        named = [model for model in self._live if model.id == name]
        if not named:
            named = [model for model in self._live if name in model.aliases]
        return [model for model in named if model.id == named[0].id]

    def resolve_aliases(self, requests: Sequence[wire.Request]) -> list[wire.Request]:
        """Replace aliases by the models' own names, whose queues their workers drain first, by the models read last."""
        own_names = {alias: self._named(alias)[0].id for model in self._live for alias in model.aliases}
        return [
            replace(request, model=own_names[request.model]) if request.model in own_names else request
            for request in requests
        ]

    def not_served(self, name: str, field: str = "model") -> ModelNotServed:
        names = [name for model in self.names for name in (model, *self._aliases(model))]
        served = f"live models: {', '.join(names)}" if names else "no worker is live"
        return ModelNotServed(
            f"{field}: no live worker serves {name[:128]!r}; {served}. "
            "A job of POST /v1/jobs may be queued anyway, with wait_for_model: true",
            field,
        )

    def _aliases(self, name: str) -> list[str]:
        return sorted({alias for model in self._live if model.id == name for alias in model.aliases})

    @property
    def names(self) -> list[str]:
        """The names of the models read last, without aliases."""
        return sorted({model.id for model in self._live})
