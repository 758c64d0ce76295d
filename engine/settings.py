"""Settings of an engine."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The model to load, and the limits of its batches and caches."""

    model: str  # a folder in Hugging Face form, or a hub id
    weights_folder: str | None = None  # safetensors to load instead of the model's own: see model/pushed_weights.py
    ranks: int = 1  # processes that hold the model together, started by mlx.launch: see model/ranks
    weights_version: int = 0  # that results name; 0: the model's own weights
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on a CPU, else the checkpoint's
    mode: Literal["default", "exact"] = "default"  # exact: the same numbers to the bit in any batch; slower
    max_batch_tokens: int = 2048  # in a step: prompt tokens of its prefill, and one per decoding sequence
    prefill_ms: int = 250  # of a step beside decoding sequences, at most: their next tokens wait no longer for it
    max_running_rows: int = 32  # sequences that generate at once
    prefix_disk_bytes: int = 0  # of files that keep such KV caches beyond the engine's end; 0: none
    prefix_folder: str | None = None  # of these files
    prefix_cache_bytes: int = 2**30  # for the KV caches of prompts that several sequences begin with
    memory_bytes: int | None = None  # for weights and caches; None: four fifths of the memory of the machine
    adapters: tuple[tuple[str, str], ...] = ()  # LoRA adapters to load: name and folder of each
    # Propose n-grams of a row's text, or tokens of a draft model or of the checkpoint's own head for multi-token
    # prediction (MTP), and verify several in a step: same tokens, sooner.
    speculation: Literal["off", "ngram", "draft", "mtp"] = "off"
    draft: str | None = None  # a folder or hub id: a smaller model with the same vocabulary, for speculation "draft"
    speculation_tokens: int = 8  # of a row that a step verifies, at most
    tries_load: bool = False  # load in a process of its own first, so that a native crash is a LoadError: see trial.py
    load_marks: str | None = None  # folder that remembers loads that ended well, which need no trial
    certificates: str | None = None  # folder of certificates, beside those in the checkpoint: see certificate.py
    require_certificate: bool = False  # serve no model without one that fits

    max_video_frames: int = 128  # that are sampled from the file of one video
    tool_parser: str = "auto"  # the format of calls, one of formats.TOOL_PARSERS; auto: what the model tells
    reasoning_parser: str = "auto"  # one of formats.REASONING_PARSERS
    tool_repair: bool = False  # read calls that a degraded model writes as text, in none of these formats

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "prefill_ms", "max_running_rows", "speculation_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")
        if self.ranks > 1:
            self._refuse_beside_ranks()
        if (self.speculation == "draft") != (self.draft is not None):
            raise ValueError(
                f"speculation is {self.speculation!r} and draft is {self.draft!r}; "
                "speculation 'draft' and a draft model need each other"
            )
        if self.prefix_disk_bytes < 0 or (self.prefix_disk_bytes and self.prefix_folder is None):
            raise ValueError(
                f"prefix_disk_bytes is {self.prefix_disk_bytes} and prefix_folder {self.prefix_folder!r}; expected at "
                "least 0, and a folder if it is more"
            )
        if self.prefix_cache_bytes < 0:
            raise ValueError(f"prefix_cache_bytes is {self.prefix_cache_bytes}, and must be at least 0")

    def _refuse_beside_ranks(self) -> None:
        """Raise ValueError for what one process alone can do."""
        alone = {
            "mode 'exact'": self.mode == "exact",
            "a draft model": self.draft is not None,
            "speculation 'mtp'": self.speculation == "mtp",
            "adapters": bool(self.adapters),
            "prefix_disk_bytes": bool(self.prefix_disk_bytes),
            "weights_folder": self.weights_folder is not None,
        }
        for name, is_asked_for in alone.items():
            if is_asked_for:
                raise ValueError(
                    f"ranks is {self.ranks}, and {name} needs a model in one process: expected one of them"
                )
