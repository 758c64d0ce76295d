"""Translate Tinker's `asample` to one job, and name its future. Pure.

A future's id is the job's, with what the reply shows of its result: `JOB.1.5.0.0` for the prompt's logprobs (1) with
the 5 most likely tokens, 0 beside each sampled one, of all tokens of the prompt (0). So nothing of a future is stored.
"""

import re
from typing import Annotated, Literal, Self

from msgspec import Meta, Struct

from scorepool import wire
from scorepool.api.dialects.top_k import SampledTopK, to_top_k
from scorepool.api.dialects.unsupported import check_supported
from scorepool.wire.request_fields import (
    MAX_LIST_LENGTH,
    MAX_SEED,
    NumChoices,
    NumTokens,
    StopString,
    Temperature,
    TokenId,
    TopP,
)

FUTURE = re.compile(r"(?P<job>[A-Za-z0-9_-]{1,128})\.(?P<numbers>[01](\.[0-9]{1,7}){3})")
SAMPLER = re.compile(r"(?P<session>[0-9a-f]{32}):(?P<number>[0-9]{1,18}):(?P<model>.{1,128})", re.DOTALL)
MAX_TOP = 1024
Top = Annotated[int, Meta(ge=0, le=MAX_TOP)]


class EncodedText(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Give token ids of a prompt."""

    type: Literal["encoded_text"]
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_LIST_LENGTH)]


class ModelInput(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Give a prompt in parts."""

    chunks: Annotated[list[EncodedText], Meta(max_length=4096)]


class TinkerSampling(Struct, frozen=True, kw_only=True):
    """Choose how to sample. Unknown fields are ignored, as Tinker does."""

    max_tokens: NumTokens | None = None
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString | TokenId], Meta(max_length=64)] | None = None
    temperature: Temperature = 1.0
    top_k: SampledTopK = -1
    top_p: TopP = 1.0


class SampleRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sample from a prompt of token ids, and report logprobs."""

    prompt: ModelInput
    sampling_params: TinkerSampling
    num_samples: NumChoices = 1
    sampling_session_id: str | None = None
    seq_id: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    base_model: str | None = None
    model_path: None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Top = 0
    topk_sample_logprobs: Top = 0
    prompt_logprobs_last_n: Annotated[int, Meta(ge=1, le=MAX_LIST_LENGTH)] | None = None
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"

    def __post_init__(self) -> None:
        check_supported(self, {"prompt_alt_tokens_k": 0, "record_stability_info": False})
        if not self.prompt_ids:
            raise ValueError("`prompt` needs a token")
        if self.topk_prompt_logprobs and not self.prompt_logprobs:
            raise ValueError("`topk_prompt_logprobs` needs `prompt_logprobs`: true")
        last_n = self.prompt_logprobs_last_n
        if last_n is not None and not (self.prompt_logprobs and last_n < len(self.prompt_ids)):
            raise ValueError(
                f"`prompt_logprobs_last_n` needs `prompt_logprobs`: true, and is less than the {len(self.prompt_ids)} "
                "tokens of `prompt`"
            )

    @property
    def prompt_ids(self) -> list[int]:
        """Return the prompt's token ids."""
        return [token_id for chunk in self.prompt.chunks for token_id in chunk.tokens]

    @property
    def model(self) -> str | None:
        """Return the model that the request or its sampling session names."""
        found = SAMPLER.fullmatch(self.sampling_session_id or "")
        return self.base_model or (found["model"] if found else None)

    @property
    def idempotency_key(self) -> str | None:
        """Return the name of the request, if it has one: sent again, it gets the same future."""
        if self.sampling_session_id is None or self.seq_id is None:
            return None
        return f"tinker {self.sampling_session_id} {self.seq_id}"  # no Idempotency-Key has a space


class Future(Struct, frozen=True, kw_only=True):
    """Name a job, and what the reply shows of its result."""

    job_id: str
    has_prompt_logprobs: bool
    top_prompt: int
    top_sampled: int
    last_n: int  # 0: all tokens of the prompt

    @classmethod
    def of(cls, job_id: str, body: SampleRequest) -> Self:
        """Return the future of the job of a body."""
        return cls(
            job_id=job_id,
            has_prompt_logprobs=bool(body.prompt_logprobs),
            top_prompt=body.topk_prompt_logprobs,
            top_sampled=body.topk_sample_logprobs,
            last_n=body.prompt_logprobs_last_n or 0,
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a future's id. Raises ValueError."""
        found = FUTURE.fullmatch(text)
        refusal = f"request_id: expected the id of a future, found {wire.quote(text)}"
        if found is None:
            raise ValueError(refusal)
        has_prompt_logprobs, top_prompt, top_sampled, last_n = map(int, found["numbers"].split("."))
        if max(top_prompt, top_sampled) > MAX_TOP:  # a reply has so many cells for each token
            raise ValueError(refusal)
        return cls(
            job_id=found["job"],
            has_prompt_logprobs=bool(has_prompt_logprobs),
            top_prompt=top_prompt,
            top_sampled=top_sampled,
            last_n=last_n,
        )

    def __str__(self) -> str:
        numbers = (int(self.has_prompt_logprobs), self.top_prompt, self.top_sampled, self.last_n)
        return ".".join((self.job_id, *map(str, numbers)))


def to_request(body: SampleRequest, model: str) -> wire.Generate:
    """Build the job of a body. A `stop` that is an empty list lets the text go on after the model's own end tokens."""
    params = body.sampling_params
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    return wire.Generate(
        model=model,
        prompt=body.prompt_ids,
        n=body.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=to_top_k(params.top_k),
        seed=params.seed,
        stop=[stop for stop in stops if isinstance(stop, str)],
        stop_token_ids=[stop for stop in stops if isinstance(stop, int)],
        ignore_eos=params.stop == [],
        include_stop_str_in_output=True,  # renderers look for the stop in the tokens
        prompt_logprobs=bool(body.prompt_logprobs),
        top_logprobs=max(body.topk_prompt_logprobs, body.topk_sample_logprobs),
    )
