"""The description of the loaded model, for the provenance of every result."""

from dataclasses import dataclass, field
from typing import Literal

from scorepool.engine.cache_room import CacheSizes

Activation = Literal["softmax", "sigmoid", "none"]
Pooling = Literal["last", "mean"]  # which hidden states become an embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Whether a certificate says that the model's numbers are transformers': see certificate.py. Errors are in nats."""

    reason: str | None = "not looked for"  # why the model is unverified; None: it is verified
    by: str | None = None
    at: str | None = None  # UTC, ISO 8601
    max_error_nats: float | None = None
    rms_error_nats: float | None = None
    certificate: str | None = None  # the beginning of its digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """What a model that classifies texts says about its labels. It has no logprobs."""

    labels: tuple[str, ...]
    activation: Activation  # which makes probabilities of logits; none for a regression
    pad_id: int | None  # the last token with another id is the one that is classified; None: the last one


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The identity of the model, how it is computed, and its limits."""

    fingerprint: str  # sha256 of the contents of the weights, the configuration and the tokenizer
    weights_version: int = 0  # 0: the weights that the engine was started for; others were pushed since
    dtype: str  # of the model's computation; logprobs are always float32
    quantization: str | None  # e.g. "4-bit affine, groups of 64"
    adapter: str | None
    mode: str  # "default", "exact", or "one row at a time" for a model whose batched path failed its self-test
    # What decides about rounding: "metal (Apple M2 Ultra)", "cpu (x86_64, openblas Haswell, 2 threads, numpy 2.4.6)".
    backend: str
    versions: dict[str, str]  # of mlx and mlx-lm, and of what shows images to a model that takes them
    context_length: int  # tokens, prompt and completion together
    max_cached_tokens: int  # that fit into memory: sequences that hold a KV cache, times the longest of them
    vocab_size: int  # rows of logits; token ids run from 0 to vocab_size - 1
    self_test: str  # "passed", or what failed and what the engine does about it
    weights_bytes: int = 0
    memory_bytes: int = 0  # for weights and caches
    cache_sizes: CacheSizes = field(default_factory=CacheSizes)
    surveyed: bool = False  # the survey compared every setting of the model's type with transformers: see surveyed.py
    speculation: str = "off"  # "ngram", "draft", "mtp", "off", or "unsupported" by the caches; changes no number
    speculation_tokens: int = 0  # proposed tokens of a row that a step verifies, at most
    draft_context_length: int = 0  # of the draft model; 0: there is none
    # Why no part of a prompt can be left out, or None: the draft model says which.
    whole_prompts: str | None = "the model is served without a draft model"
    verification: Verification = field(default_factory=Verification)
    classifier: Classifier | None = None  # None for a language model
    pooling: Pooling | None = None  # how it embeds unless told otherwise; None: it makes no embeddings

    images: str | None = None  # the family of models whose images it takes
    images_unsupported: str | None = None  # why it takes none, though its checkpoint could

    @property
    def speculations(self) -> tuple[str, ...]:
        """What can propose a row's tokens. Beside a draft model or a head, n-grams can."""
        if self.speculation in ("draft", "mtp"):
            return ("off", "ngram", self.speculation)
        return ("off", "ngram") if self.speculation == "ngram" else ("off",)

    def changes_to(self, other: "ModelInfo") -> list[str]:
        """Name what is different of the other, as far as it decides about the numbers."""
        names = ("fingerprint", "dtype", "quantization", "adapter", "mode", "backend")
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name} was {before} and is {now}" for name, before, now in pairs if before != now]

    def summary(self) -> str:
        """Describe the model in one line, for logs."""
        verified = self.verification.reason
        return ", ".join(
            (
                f"{self.dtype}{f' ({self.quantization})' if self.quantization else ''}",
                f"mode {self.mode}",
                self.backend,
                f"context of {self.context_length} tokens",
                f"weights of {self.weights_bytes / 2**20:,.0f} MiB",
                f"room for {self.max_cached_tokens:,} cached tokens",
                f"self-test {self.self_test}",
                f"speculation {self.speculation}",
                "verified" if verified is None else f"unverified: {verified}",
                f"fingerprint {self.fingerprint[:12]}, weights version {self.weights_version}",
            )
        )
