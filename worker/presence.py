"""The card that a worker shows while it lives: what it serves. It expires with its worker."""

import time

from redis.client import Pipeline

from wire import Keys, ModelCard, encode


class Presence:
    def __init__(self, card: ModelCard, lease_s: float) -> None:
        self.card = card
        self.ttl_s = lease_s * 1.5

    def show(self, pipeline: Pipeline) -> None:
        """Due every fifth of a lease."""
        pipeline.set(Keys.card(self.card.worker), encode(self.card), px=int(self.ttl_s * 1000))
        pipeline.zadd(Keys.models, {self.card.worker: time.time() + self.ttl_s})

    def withdraw(self, pipeline: Pipeline) -> None:
        pipeline.delete(Keys.card(self.card.worker))
        pipeline.zrem(Keys.models, self.card.worker)
