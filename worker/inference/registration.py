"""Register the model that a worker serves. The registration expires unless the worker renews it."""

from collections.abc import Callable

from msgspec.structs import replace
from redis.client import Pipeline

from scorepool.engine import ChatCodec, Engine, ModelInfo
from scorepool.store import Keys
from scorepool.wire import (
    Classifier,
    CrosscheckStatus,
    EngineLoad,
    Provenance,
    ServedAdapter,
    ServedModel,
    TokenizerInfo,
    WorkerLink,
    encode,
)
from scorepool.worker.rq.clock import REDIS_CLOCK


def served_model_of(
    provenance: Provenance, model_info: ModelInfo, codec: ChatCodec, worker: str, aliases: list[str]
) -> ServedModel:
    return ServedModel(
        id=provenance.model,
        stamp=provenance,
        context_length=model_info.context_length,
        vocab_size=model_info.vocab_size,
        vocabulary=codec.tokenizer.digest(),
        self_test=model_info.self_test,
        surveyed=model_info.surveyed,
        worker=worker,
        classifier=_classifier_of(model_info),
        pooling=model_info.pooling,
        images=model_info.images,
        images_unsupported=model_info.images_unsupported,
        aliases=aliases,
        created=int(REDIS_CLOCK.now_s()),
        tokenizer=TokenizerInfo(
            bos_token=codec.tokenizer.bos_token,
            eos_token=codec.tokenizer.eos_token,
            pad_token=codec.tokenizer.pad_token,
            chat_template=codec.template.source,
        ),
    )


def _classifier_of(model_info: ModelInfo) -> Classifier | None:
    found = model_info.classifier
    return None if found is None else Classifier(labels=list(found.labels), activation=found.activation)


def served_adapters(engine: Engine) -> list[ServedAdapter]:
    """Describe the adapters that jobs can name now."""
    return [
        ServedAdapter(name=each.name, fingerprint=each.fingerprint, path=each.folder, rank=each.rank, kind=each.kind)
        for each in engine.adapters
    ]


class WorkerRegistration:
    """Keep what this worker serves in Redis: as live while the worker is, and as recent for `model_grace_s` after.

    The keys of both expire in Redis; sweep.lua drops names without a key. Times are by Redis's clock.
    """

    def __init__(
        self,
        served_model: ServedModel,
        read_link: Callable[[], WorkerLink],
        model_grace_s: int,
        read_load: Callable[[], EngineLoad | None] = lambda: None,
        card: str | None = None,
    ) -> None:
        """`card` is the name of the entry, if it is not the worker's: a worker of several models has one for each."""
        self.card = card or served_model.worker
        self.served_model = served_model
        self.read_link = read_link
        self.read_load = read_load
        self.read_adapters: Callable[[], list[ServedAdapter]] = list
        self.model_grace_s = model_grace_s

    def show_crosscheck(self, status: CrosscheckStatus) -> None:
        """Show the status from the next renewal on. Any thread may call it."""
        self.served_model = replace(self.served_model, crosscheck=status)

    def show_model(self, provenance: Provenance, model_info: ModelInfo) -> None:
        """Show what is served now from the next renewal on. Any thread may call it."""
        self.served_model = replace(
            self.served_model,
            stamp=provenance,
            self_test=model_info.self_test,
            context_length=model_info.context_length,
        )

    def renew(self, pipeline: Pipeline) -> None:
        """Write the registration, which lasts for one and a half leases. Due with every heartbeat."""
        card, model, link = self.card, self.served_model.id, self.read_link()
        ttl_s = 1.5 * link.lease_s
        packed = encode(replace(self.served_model, link=link, load=self.read_load(), adapters=self.read_adapters()))
        pipeline.set(Keys.served_model(card), packed, px=int(ttl_s * 1000))
        pipeline.zadd(Keys.models, {card: REDIS_CLOCK.now_s() + ttl_s})
        if self.model_grace_s and self.served_model.takes_jobs:
            pipeline.set(Keys.recent_model(model), packed, ex=self.model_grace_s)
            pipeline.zadd(Keys.recent_models, {model: REDIS_CLOCK.now_s()})
            pipeline.expire(Keys.recent_models, self.model_grace_s)

    def remove(self, pipeline: Pipeline) -> None:
        pipeline.delete(Keys.served_model(self.card))
        pipeline.zrem(Keys.models, self.card)
