"""What a worker serves, and the card that says so while it lives: it expires with its worker."""

import time
from collections.abc import Iterable

from redis.client import Pipeline

from scorepool.engine import ModelInfo, Tokenizer
from scorepool.store import Keys, Settings, SettingsError, parse_model, queue_names
from scorepool.wire import Provenance, ServedModel, TokenizerInfo, encode


def served_model(settings: Settings, queues: Iterable[str]) -> tuple[list[str], str]:
    """The model's names, and the folder or hub id to load it from. Raises SettingsError."""
    if not settings.model:
        raise SettingsError("SCOREPOOL_MODEL is not set; give NAME=FOLDER_OR_HUB_ID, the model to serve")
    names, source = parse_model(settings.model)
    for queue in queues:
        if queue not in queue_names(*names):
            own = ", ".join(queue_names(*names))
            raise SettingsError(f"queue {queue!r} is not one of those of SCOREPOOL_MODEL={settings.model}: {own}")
    return names, source


def card_of(
    stamp: Provenance, model_info: ModelInfo, tokenizer: Tokenizer, worker: str, aliases: list[str]
) -> ServedModel:
    return ServedModel(
        id=stamp.model,
        stamp=stamp,
        context_length=model_info.context_length,
        vocab_size=model_info.vocab_size,
        self_test=model_info.self_test,
        worker=worker,
        aliases=aliases,
        created=int(time.time()),
        tokenizer=TokenizerInfo(
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            pad_token=tokenizer.pad_token,
            chat_template=tokenizer.chat_template,
        ),
    )


class WorkerRegistration:
    def __init__(self, card: ServedModel, lease_s: float) -> None:
        self.card = card
        self.ttl_s = lease_s * 1.5

    def show(self, pipeline: Pipeline) -> None:
        """Due every fifth of a lease."""
        pipeline.set(Keys.card(self.card.worker), encode(self.card), px=int(self.ttl_s * 1000))
        pipeline.zadd(Keys.models, {self.card.worker: time.time() + self.ttl_s})

    def withdraw(self, pipeline: Pipeline) -> None:
        pipeline.delete(Keys.card(self.card.worker))
        pipeline.zrem(Keys.models, self.card.worker)
