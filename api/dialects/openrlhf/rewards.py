"""Translate OpenRLHF's `/get_reward`: the reward of each text. Pure."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects import classify_jobs
from scorepool.api.dialects.fields import map_field
from scorepool.api.dialects.openai.tokens import OptionalModel
from scorepool.api.dialects.protocol import Context, Endpoint, JobCount
from scorepool.wire.request_fields import MAX_LIST_LENGTH, Text


class RewardRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Give texts to a reward model: each a prompt and its response."""

    query: Annotated[
        list[Text],
        Meta(
            min_length=1,
            max_length=MAX_LIST_LENGTH,
            description="Texts with their special tokens, none of which is added. Padding around a text is left out.",
        ),
    ]
    model: OptionalModel = None
    prompts: Annotated[Any, Meta(description="Not read: `query` has them.")] = None
    labels: Annotated[Any, Meta(description="Not read.")] = None


class RewardResponse(Struct, frozen=True, kw_only=True):
    """Report the reward model's logit for each text, twice: OpenRLHF trains on `rewards` and filters by `scores`."""

    rewards: list[float]
    scores: list[float]
    extra_logs: Annotated[
        dict[str, list[float]], Meta(description="Always empty: nothing else for the trainer to log.")
    ] = {}


class RewardEndpoint(Endpoint[RewardRequest]):
    name = "get_reward"
    path = "/get_reward"
    summary = "Rewards of texts"
    description = "The logit of a served classifier of one label for each text. If one text fails, the request fails."
    example: ClassVar = {"query": ["<s>What is blue? The sky.</s>"]}
    body_type = RewardRequest
    reply_type = RewardResponse

    def job_count(self, body: RewardRequest) -> JobCount:
        return JobCount(
            classify_jobs.num_jobs(len(body.query)), "query", f"jobs of {classify_jobs.ITEMS_PER_JOB} texts each"
        )

    def to_requests(self, body: RewardRequest, context: Context) -> Iterator[wire.Request]:
        assert context.served_model is not None
        classify_jobs.check_one_label(context.served_model)
        items = [
            wire.ClassifyItem(prompt=_without_padding(text, context.served_model.tokenizer)) for text in body.query
        ]
        return classify_jobs.to_classify_jobs(
            items, context.served_model.id, context.timeout_s, add_special_tokens=False
        )

    def to_reply(self, body: RewardRequest, results: Sequence[wire.Result], context: Context) -> RewardResponse:
        rewards = [float(one.logits[0]) for one in classify_jobs.classifications(results)]
        return RewardResponse(rewards=rewards, scores=rewards)

    def field_name(self, body: RewardRequest, field: str) -> str:
        found = classify_jobs.find_item(field)
        return _other_field(field) if found is None else f"query[{found[0]}]"


def _without_padding(text: str, tokenizer: wire.TokenizerInfo | None) -> str:
    """Return the text without the padding around it. One end token stays where the model pads with it."""
    pad = tokenizer and tokenizer.pad_token
    if not pad:
        return text
    start, end = 0, len(text)
    while text.startswith(pad, start):
        start += len(pad)
    while text.endswith(pad, start, end):
        end -= len(pad)
    keeps_one = text.endswith(pad) and tokenizer is not None and pad == tokenizer.eos_token
    return text[start:end] + (pad if keeps_one else "")


_other_field = map_field({})
GET_REWARD = RewardEndpoint()
