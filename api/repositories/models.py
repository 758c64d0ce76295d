"""Which models live workers serve, from the cards that the workers keep in Redis."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace
from redis.asyncio import Redis

from scorepool import store, wire
from scorepool.api.http.errors import ModelNotServed
from scorepool.api.repositories import decode as stored

FRESH_S = 1.0  # how long the cards read last answer for


class Models:
    """A card expires with its worker, by Redis's clock; the list is read again when it is older than FRESH_S."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._cards: list[wire.ServedModel] = []
        self._read_at = float("-inf")

    async def cards(self) -> list[wire.ServedModel]:
        """Ordered by model, then by worker."""
        names: Any = await self._redis.zrange(store.Keys.models, 0, -1)
        packed: Any = await self._redis.mget([store.Keys.card(stored.text(name)) for name in names]) if names else []
        cards = [stored.message(card, wire.ServedModel, "msgpack") for card in packed]
        self._cards = sorted((card for card in cards if card), key=lambda card: (card.id, card.worker))
        self._read_at = time.monotonic()
        return self._cards

    async def serving(self, models: Iterable[str]) -> dict[str, list[wire.ServedModel]]:
        """Cards by name or alias, read again at most once: when they are old, or when one of the models is not among
        them, for its worker may just have started. Cards of one alias are of one model."""
        wanted = set(models)
        known = {name for card in self._cards for name in (card.id, *card.aliases)}
        if time.monotonic() - self._read_at > FRESH_S or not wanted <= known:
            await self.cards()
        return {model: self._named(model) for model in wanted}

    def _named(self, model: str) -> list[wire.ServedModel]:
        """A model's own name comes before others' aliases; of two models with one alias the first by name has it."""
        named = [card for card in self._cards if card.id == model]
        if not named:
            named = [card for card in self._cards if model in card.aliases]
        return [card for card in named if card.id == named[0].id]

    def under_own_names(self, requests: Sequence[wire.Request]) -> list[wire.Request]:
        """Aliases, by the cards read last, replaced by the name whose queues the model's workers drain first."""
        owns = {alias: self._named(alias)[0].id for card in self._cards for alias in card.aliases}
        return [
            replace(request, model=owns[request.model]) if request.model in owns else request for request in requests
        ]

    def unserved(self, model: str, field: str = "model") -> ModelNotServed:
        served = f"live models: {', '.join(self.names)}" if self.names else "no worker is live"
        return ModelNotServed(
            f"{field}: no live worker serves {model[:128]!r}; {served}. "
            "A job of POST /v1/jobs may be queued anyway, with wait_for_model: true",
            field,
        )

    @property
    def names(self) -> list[str]:
        """Of the models read last, without aliases."""
        return sorted({card.id for card in self._cards})
