"""The formats of function calls and of reasoning, by the names that vLLM gives them. No MLX."""

from collections.abc import Mapping

from scorepool.engine.text.chat.call_formats import (
    deepseek,
    functionary,
    gemma,
    json_calls,
    keys_and_values,
    kimi,
    mistral,
    pythonic,
    tagged_parameters,
)
from scorepool.engine.text.chat.call_formats.call_format import CallFormat

# A template that tells several of them tells the first.
FORMATS: Mapping[str, CallFormat] = {
    "deepseek_v3": deepseek.V3,
    "deepseek_v31": deepseek.V31,
    "deepseek_v32": tagged_parameters.DEEPSEEK_V32,
    "deepseek_v4": tagged_parameters.DEEPSEEK_V4,
    "functiongemma": gemma.FUNCTION_GEMMA,
    "functionary": functionary.V31,
    "functionary_v32": functionary.V32,
    "gemma4": gemma.GEMMA4,
    "glm47": keys_and_values.GLM,
    "granite": json_calls.GRANITE,
    "hermes": json_calls.HERMES,
    "jamba": json_calls.JAMBA,
    "kimi_k2": kimi.K2,
    "lfm2": pythonic.LFM2,
    "llama4_pythonic": pythonic.LLAMA4,
    "pythonic": pythonic.PYTHONIC,
    "llama3_json": json_calls.LLAMA3,
    "longcat": keys_and_values.LONGCAT,
    "minimax_m2": tagged_parameters.MINIMAX_M2,
    "mistral": mistral.MISTRAL,
    "nemotron_json": json_calls.NEMOTRON,
    "phi4_mini_json": json_calls.PHI4_MINI,
    "qwen3_coder": tagged_parameters.QWEN3_CODER,
    "seed_oss": tagged_parameters.SEED_OSS,
}
ALIASES: Mapping[str, str] = {  # other names of the same formats
    "glm45": "glm47",
    "granite4": "hermes",
    "llama4_json": "llama3_json",
    "mimo": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
}
HARMONY_NAMES = ("gpt_oss", "openai")  # of gpt-oss's messages with headers, vLLM's name last
_OF_MLX_LM = {each.mlx_lm: name for name, each in FORMATS.items() if each.mlx_lm} | {"laguna": "glm47"}
_THINK = ("<think>", "</think>")
REASONING_TAGS: Mapping[str, tuple[str, str]] = {
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "gemma4": ("<|channel>thought", "<channel|>"),
    "glm45": _THINK,
    "holo2": _THINK,
    "kimi_k2": _THINK,
    "longcat": ("<longcat_think>", "</longcat_think>"),
    "minimax_m2": _THINK,
    "mistral": ("[THINK]", "[/THINK]"),
    "nemotron_v3": _THINK,
    "qwen3": _THINK,
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
HARMONY_REASONING_NAMES = ("gpt_oss", "openai_gptoss")
# The names that a worker may choose from.
TOOL_PARSERS = ("auto", "none", *sorted({*FORMATS, *ALIASES, *HARMONY_NAMES}))
REASONING_PARSERS = ("auto", "none", *sorted({*REASONING_TAGS, *HARMONY_REASONING_NAMES}))


def format_of_template(template: str) -> str | None:
    """Return the name of the format that a chat template tells, None if it tells none of ours."""
    told = (name for name, each in FORMATS.items() if each.tells and all(tell in template for tell in each.tells))
    return next(told, None)


def format_of_mlx_lm(name: str) -> str | None:
    """Return the name of the format that mlx-lm calls by this name, None if only mlx-lm knows it."""
    return _OF_MLX_LM.get(name)
