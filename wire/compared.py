"""Define what a compare job finds: how far two models are apart."""

from typing import Annotated

from msgspec import Meta, Struct

from scorepool.wire.columns import Floats
from scorepool.wire.provenance import Provenance


class Divergence(Struct, frozen=True, kw_only=True):
    """Summarise KL divergences, in nats, over all tokens. The names are those of llama.cpp's perplexity tool."""

    mean: float
    median: float
    p99: Annotated[float, Meta(description="99 % of the tokens have at most this much.")]
    max: float


class ComparedSequence(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Compare the tokens of one sequence under two models. The columns have one entry per token of the result.

    A text's first token has no distribution, and null entries, if the model's texts begin without BOS.
    """

    base_logprobs: Annotated[Floats, Meta(description="Logprobs of the tokens under the base.")]
    kld_lower: Annotated[Floats, Meta(description="KL(base || model) of each distribution, at least.")]
    kld_upper: Annotated[Floats, Meta(description="The same, at most. Equal if the whole vocabulary was compared.")]
    same_top: Annotated[list[bool | None], Meta(description="True where both find the same token most likely.")]
    base_ranks: Annotated[
        list[int | None] | None, Meta(description="Ranks of the tokens under the base, with `rank`.")
    ] = None


class ModelComparison(Struct, frozen=True, kw_only=True):
    """Say how far a model is from its base, over all tokens of all sequences.

    `kld_lower` and `kld_upper` are KL(base || model) from the base's `num_top` most likely tokens, with what the others
    add at least and at most. Both are exact, and equal, if these are all.
    """

    base: Annotated[Provenance, Meta(description="The stamp of the base's result.")]
    base_job_id: Annotated[str, Meta(description="The score job of the base.")]
    num_tokens: int
    num_top: int
    is_exact: Annotated[bool, Meta(description="True if the whole vocabulary was compared.")]
    kld_lower: Divergence
    kld_upper: Divergence
    same_top_p: Annotated[float, Meta(description="Share of the tokens where both find the same one most likely.")]
    mean_delta_p: Annotated[float, Meta(description="Mean of p(model) - p(base) of the tokens, from -1 to 1.")]
    rms_delta_p: Annotated[float, Meta(description="Root mean square of these differences.")]
    logprob_sum_difference: Annotated[float, Meta(description="log p(model) - log p(base) of all tokens together.")]
    sequences: list[ComparedSequence]
