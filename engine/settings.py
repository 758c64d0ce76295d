"""What an engine is asked to be."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    model: str  # a folder in Hugging Face form, or a hub id
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on a CPU, else the checkpoint's
    max_batch_tokens: int = 8192  # of a step: padded prompt tokens of its prefill and one per decoding row
    max_running_rows: int = 32  # rows that hold a KV cache between steps

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_running_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")
