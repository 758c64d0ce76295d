"""Translate vLLM's `/score`: how well each document fits a query. Pure."""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.fields import map_field
from scorepool.api.dialects.openai.sampling import CompletionUsage, usage_of_results
from scorepool.api.dialects.openai.tokens import OptionalModel
from scorepool.api.dialects.priority import PriorityNumber, to_priority
from scorepool.api.dialects.protocol import Context, Endpoint, JobCount
from scorepool.api.dialects.truncation import NAMES, RIGHT, TruncatePromptTokens, check_truncation, truncation_fields
from scorepool.api.dialects.vllm import foreign_fields, pair_jobs
from scorepool.api.dialects.vllm.classify import TruncationSide, UseActivation
from scorepool.api.dialects.vllm.pair_jobs import Pair
from scorepool.wire.request_fields import MAX_LIST_LENGTH, CacheSalt, Text

Texts = Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_LIST_LENGTH)]
Instruction = Annotated[
    Text | None, Meta(description="The task, for a reranker that says yes or no. null: Qwen3-Reranker's own.")
]
_NAMES = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))


class PairScoreRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Score pairs: of one text and each of a list, or of two lists of the same length."""

    model: OptionalModel = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Annotated[Texts | None, Meta(description="Another name of `documents`.")] = None
    text_1: Annotated[Texts | None, Meta(description="Another name of `queries`, with `text_2`.")] = None
    text_2: Texts | None = None
    data_1: Annotated[Texts | None, Meta(description="Another name of `queries`, with `data_2`.")] = None
    data_2: Texts | None = None
    instruction: Instruction = None
    use_activation: UseActivation = None
    cache_salt: CacheSalt = None
    priority: PriorityNumber = None
    truncate_prompt_tokens: TruncatePromptTokens = None
    truncation_side: TruncationSide = None

    def __post_init__(self) -> None:
        check_truncation(self.truncate_prompt_tokens)
        given = {name for names in _NAMES for name in names if getattr(self, name) is not None}
        if all(given != set(names) for names in _NAMES):
            raise ValueError(
                "give two lists: `queries` and `documents`, `text_1` and `text_2`, or `data_1` and `data_2`"
            )
        first, second = self.names
        num_first, num_second = len(_as_list(getattr(self, first))), len(_as_list(getattr(self, second)))
        if num_first not in (1, num_second):
            raise ValueError(f"`{first}` has {num_first} texts; expected 1, or {num_second} as `{second}` has")

    @property
    def names(self) -> tuple[str, str]:
        """Return the names of the two lists that are given."""
        return next(names for names in _NAMES if all(getattr(self, name) is not None for name in names))

    @property
    def pairs(self) -> list[Pair]:
        """Return the pairs, in their order."""
        first, second = (_as_list(getattr(self, name)) for name in self.names)
        return [Pair(first[0] if len(first) == 1 else first[index], text) for index, text in enumerate(second)]


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


class PairScore(Struct, frozen=True, kw_only=True):
    """Report how well a document fits."""

    index: int
    object: Literal["score"] = "score"
    score: Annotated[float, Meta(description="A number from 0 to 1; a logit with `use_activation` false.")]


class PairScoreResponse(Struct, frozen=True, kw_only=True):
    """Report the score of each pair, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: CompletionUsage


class PairScoreEndpoint(Endpoint[PairScoreRequest]):
    name = "score_pairs"
    path = "/score"
    summary = "Scores of pairs of texts"
    description = (
        "The score of each pair of texts, from 0 to 1, by a classifier of one label, or by a language model that reads "
        "pairs in the format of Qwen3-Reranker and answers yes or no. `/v1/score` takes these bodies too."
    )
    example: ClassVar = {"model": "reranker", "text_1": "What is blue?", "text_2": ["The sky.", "The grass."]}
    body_type = PairScoreRequest
    reply_type = PairScoreResponse
    foreign_fields = foreign_fields.POOLING

    def job_count(self, body: PairScoreRequest) -> JobCount:
        return JobCount(len(body.pairs), body.names[1], "pairs")

    def texts_to_encode(self, body: PairScoreRequest, served_model: wire.ServedModel) -> Sequence[str]:
        return pair_jobs.texts_to_encode(served_model)

    def to_requests(self, body: PairScoreRequest, context: Context) -> Iterator[wire.Request]:
        priority = to_priority(body.priority)
        truncation = truncation_fields(body.truncate_prompt_tokens, body.truncation_side, RIGHT)
        return pair_jobs.to_requests(
            body.pairs, body.instruction, priority, body.cache_salt, context, body.names[1], truncation
        )

    def to_reply(self, body: PairScoreRequest, results: Sequence[wire.Result], context: Context) -> PairScoreResponse:
        assert context.served_model is not None
        return PairScoreResponse(
            id=f"score-{context.unique_id}",
            created=context.created,
            model=body.model or context.served_model.id,
            data=[
                PairScore(index=index, score=score)
                for index, score in enumerate(pair_jobs.scores(results, body.use_activation))
            ],
            usage=usage_of_results(results),
        )

    def field_name(self, body: PairScoreRequest, field: str) -> str:
        index = pair_jobs.find_pair(field)
        if index is None:
            return _other_field(field)
        name = body.names[1]
        return name if isinstance(getattr(body, name), str) else f"{name}[{index}]"


_other_field = map_field(NAMES)
SCORE_PAIRS = PairScoreEndpoint()
