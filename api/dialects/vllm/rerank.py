"""Translate vLLM's `/rerank`, which is Jina's and Cohere's: documents, the one that fits a query best first. Pure."""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar

from msgspec import UNSET, Meta, Struct, UnsetType

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
from scorepool.api.dialects.vllm.score import Instruction
from scorepool.wire.request_fields import MAX_LIST_LENGTH, CacheSalt, Text


class Document(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Hold a document's text."""

    text: Text


class RerankRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Order documents by how well they fit a query."""

    model: OptionalModel = None
    query: Text
    documents: Annotated[list[Text | Document], Meta(min_length=1, max_length=MAX_LIST_LENGTH)]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1, description="Report so many, the best. 0 and null: all.")] | None = (
        None
    )
    return_documents: Annotated[bool | None, Meta(description="false: without `document`.")] = None
    instruction: Instruction = None
    use_activation: UseActivation = None
    cache_salt: CacheSalt = None
    priority: PriorityNumber = None
    truncate_prompt_tokens: TruncatePromptTokens = None
    truncation_side: TruncationSide = None

    def __post_init__(self) -> None:
        check_truncation(self.truncate_prompt_tokens)

    @property
    def texts(self) -> list[str]:
        """Return the documents' texts."""
        return [each.text if isinstance(each, Document) else each for each in self.documents]


class RerankResult(Struct, frozen=True, kw_only=True):
    """Report how well a document fits."""

    index: Annotated[int, Meta(description="Its place in the request's `documents`.")]
    document: Document | UnsetType = UNSET
    relevance_score: Annotated[float, Meta(description="A number from 0 to 1; a logit with `use_activation` false.")]


class RerankResponse(Struct, frozen=True, kw_only=True):
    """Report documents, the best first. Of two with the same score, the one that the request has first is first."""

    id: str
    model: str
    usage: CompletionUsage
    results: list[RerankResult]


class RerankEndpoint(Endpoint[RerankRequest]):
    name = "rerank"
    path = "/rerank"
    summary = "Order documents by a query"
    description = (
        "Documents by their scores, which are those of `/score`, the best first. The same route is at `/v1/rerank` and "
        "`/v2/rerank`."
    )
    example: ClassVar = {"model": "reranker", "query": "What is blue?", "documents": ["The sky.", "The grass."]}
    body_type = RerankRequest
    reply_type = RerankResponse
    foreign_fields = foreign_fields.POOLING
    other_paths = ("/v1/rerank", "/v2/rerank")

    def job_count(self, body: RerankRequest) -> JobCount:
        return JobCount(len(body.documents), "documents", "documents")

    def texts_to_encode(self, body: RerankRequest, served_model: wire.ServedModel) -> Sequence[str]:
        return pair_jobs.texts_to_encode(served_model)

    def to_requests(self, body: RerankRequest, context: Context) -> Iterator[wire.Request]:
        pairs = [Pair(body.query, text) for text in body.texts]
        truncation = truncation_fields(body.truncate_prompt_tokens, body.truncation_side, RIGHT)
        priority = to_priority(body.priority)
        return pair_jobs.to_requests(
            pairs, body.instruction, priority, body.cache_salt, context, "documents", truncation
        )

    def to_reply(self, body: RerankRequest, results: Sequence[wire.Result], context: Context) -> RerankResponse:
        assert context.served_model is not None
        texts, scores = body.texts, pair_jobs.scores(results, body.use_activation)
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or len(scores)]
        shows_text = body.return_documents is not False
        return RerankResponse(
            id=f"rerank-{context.unique_id}",
            model=body.model or context.served_model.id,
            usage=usage_of_results(results),
            results=[
                RerankResult(
                    index=index,
                    document=Document(text=texts[index]) if shows_text else UNSET,
                    relevance_score=scores[index],
                )
                for index in best
            ],
        )

    def field_name(self, body: RerankRequest, field: str) -> str:
        index = pair_jobs.find_pair(field)
        return _other_field(field) if index is None else f"documents[{index}]"


_other_field = map_field(NAMES)
RERANK = RerankEndpoint()
