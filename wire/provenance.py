"""Define what a result says of itself: what computed it, and how many tokens it took."""

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace


class Usage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Count the tokens that a job read and wrote."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: Annotated[
        int,
        Meta(
            description="Prompt tokens that were not computed for this job: of a prefix that it shares with others, or "
            "of items from the result cache. Absent: none."
        ),
    ] = 0
    kept_tokens: Annotated[
        int | None,
        Meta(
            description="Prompt tokens that went through the model, with `specprefill`: all of them if the prompt is "
            "short. Absent: all of them, without it."
        ),
    ] = None
    images: Annotated[
        int,
        Meta(description="Images and videos that the prompts show, in a score job those of each item. Absent: none."),
    ] = 0
    video_frames: Annotated[int, Meta(description="Frames of videos that the prompt shows. Absent: none.")] = 0
    speculation: Annotated[
        Literal["ngram", "draft", "mtp"] | None,
        Meta(description="The source of proposed tokens: n-grams, a draft model or the model's head. Absent: none."),
    ] = None
    speculation_tokens: Annotated[
        int, Meta(description="Proposed tokens in one step, at most. Absent: none were to be proposed.")
    ] = 0
    proposed_tokens: Annotated[int, Meta(description="Tokens that speculation proposed. Absent: none.")] = 0
    accepted_tokens: Annotated[int, Meta(description="Proposed tokens that the model generated. Absent: none.")] = 0


class Verification(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Say whether `scorepool certify` found a model's numbers to be transformers', as the model is served."""

    status: Literal["verified", "unverified"]
    reason: Annotated[str | None, Meta(description="The reason why the model is unverified.")] = None
    by: Annotated[str | None, Meta(description="The name of who certified the model.")] = None
    at: Annotated[str | None, Meta(description="Time of the comparison: UTC, as in ISO 8601.")] = None
    max_error_nats: Annotated[float | None, Meta(description="Largest difference of a logprob.")] = None
    rms_error_nats: Annotated[float | None, Meta(description="Root mean square of the differences.")] = None
    certificate: Annotated[str | None, Meta(description="The first 16 digits of the certificate's digest.")] = None


class Provenance(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Name the model, weights and software that computed a result.

    Results are comparable if their stamps are equal, apart from `verification`, `weights_version`, `cached` and
    `cached_items`.
    """

    model: str
    fingerprint: Annotated[str, Meta(description="Hash of the weights, the configuration and the tokenizer.")]
    dtype: str
    quantization: str | None
    adapter: Annotated[
        str | None, Meta(description="Name of the LoRA adapter, `@` and the first 16 digits of its fingerprint.")
    ]
    mode: Annotated[str, Meta(description='"default", "exact", or "one row at a time": see docs/numbers.md.')]
    backend: Annotated[str, Meta(description='Device and matrix library, such as "metal (Apple M2 Ultra)".')]
    versions: Annotated[
        dict[str, str],
        Meta(
            description="The versions of scorepool, mlx and mlx-lm; of a model that takes images also those of av, "
            "mlx-vlm, pillow and transformers."
        ),
    ]
    verification: Annotated[Verification | None, Meta(description="Absent in results of releases without it.")] = None
    pooling: Annotated[
        Literal["last", "mean"] | None, Meta(description="The pooling of the embeddings. Only of an embed job.")
    ] = None
    approximate: Annotated[
        Literal["specprefill"] | None,
        Meta(
            description="The reason why the numbers are not the model's for the whole prompt: `specprefill` left some "
            "of its tokens out. Absent: they are."
        ),
    ] = None
    cached: Annotated[
        bool,
        Meta(
            description="True if nothing was computed for this job: every number is of an earlier or a concurrent one "
            "with the same tokens and options. Absent: false."
        ),
    ] = False
    cached_items: Annotated[
        int, Meta(description="Sequences whose numbers were not computed for this job. Absent: none.")
    ] = 0
    weights_version: Annotated[
        int | None,
        Meta(
            description="The version of the weights; 0: those that the worker was started with. Absent in results of "
            "releases without it."
        ),
    ] = None

    @property
    def weights(self) -> str:
        """What a token delta of the same computation names: see TokenDelta."""
        return weights_of(self.fingerprint, self.adapter)


def weights_of(fingerprint: str, adapter: str | None) -> str:
    """Name the weights that compute tokens, given their fingerprint and the adapter with its own."""
    return fingerprint if adapter is None else f"{fingerprint},{adapter}"


def with_adapter(stamp: Provenance, label: str) -> Provenance:
    """Return the stamp of what an adapter computes on a model. No certificate compares it."""
    reason = "certificates compare the base model, and the job has an adapter"
    return replace(stamp, adapter=label, verification=Verification(status="unverified", reason=reason))
