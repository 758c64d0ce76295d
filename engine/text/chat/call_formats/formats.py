"""The formats of function calls and of reasoning, by the names that vLLM gives them. No MLX."""

from collections.abc import Mapping

from scorepool.engine.text.chat.call_formats import (
    deepseek,
    functionary,
    gemma,
    json_calls,
    json_dialects,
    keys_and_values,
    kimi,
    minimax_m3,
    mistral,
    pythonic,
    tagged_parameters,
)
from scorepool.engine.text.chat.call_formats.call_format import CallFormat

# A template that tells several of them tells the first.
FORMATS: Mapping[str, CallFormat] = {
    "apertus": json_dialects.APERTUS,
    "cohere_command3": json_dialects.COHERE,
    "deepseek_v3": deepseek.V3,
    "deepseek_v31": deepseek.V31,
    "deepseek_v32": tagged_parameters.DEEPSEEK_V32,
    "deepseek_v4": tagged_parameters.DEEPSEEK_V4,
    "ernie45": json_calls.ERNIE,
    "functiongemma": gemma.FUNCTION_GEMMA,
    "functionary": functionary.V31,
    "functionary_v32": functionary.V32,
    "gemma4": gemma.GEMMA4,
    "gigachat3": json_dialects.GIGACHAT3,
    "glm47": keys_and_values.GLM,
    "granite": json_calls.GRANITE,
    "granite-20b-fc": json_dialects.GRANITE_20B,
    "hermes": json_calls.HERMES,
    "hunyuan_a13b": json_dialects.HUNYUAN,
    "hy_v3": keys_and_values.HY_V3,
    "inkling": json_dialects.INKLING,
    "internlm": json_dialects.INTERNLM,
    "jamba": json_calls.JAMBA,
    "kimi_k2": kimi.K2,
    "kimi_k3": kimi.K3,
    "lfm2": pythonic.LFM2,
    "llama4_pythonic": pythonic.LLAMA4,
    "pythonic": pythonic.PYTHONIC,
    "llama3_json": json_calls.LLAMA3,
    "longcat": keys_and_values.LONGCAT,
    "minicpm5": tagged_parameters.MINICPM5,
    "minimax_m2": tagged_parameters.MINIMAX_M2,
    "minimax_m3": minimax_m3.M3,
    "mistral": mistral.MISTRAL,
    "nemotron_json": json_calls.NEMOTRON,
    "olmo3": pythonic.OLMO3,
    "phi4_mini_json": json_calls.PHI4_MINI,
    "qwen3_coder": tagged_parameters.QWEN3_CODER,
    "seed_oss": tagged_parameters.SEED_OSS,
    "solar_open2": keys_and_values.SOLAR_OPEN2,
    "step3": tagged_parameters.STEP3,
    "xlam": json_calls.XLAM,
}
ALIASES: Mapping[str, str] = {  # other names of the same formats
    "cohere_command4": "cohere_command3",
    "glm45": "glm47",
    "granite4": "hermes",
    "llama4_json": "llama3_json",
    "mimo": "qwen3_coder",
    "poolside_v1": "glm47",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
}
HARMONY_NAMES = ("gpt_oss", "openai")  # of gpt-oss's messages with headers, vLLM's name last
_OF_MLX_LM = {each.mlx_lm: name for name, each in FORMATS.items() if each.mlx_lm} | {"laguna": "glm47"}
_THINK = ("<think>", "</think>")
_WITH_THINK: tuple[str, ...] = (
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v4",
    "ernie45",
    "glm45",
    "glm47",
    "holo2",
    "hy_v3",
    "kimi_k2",
)
_WITH_THINK += ("mimo", "minimax_m2", "nemotron_v3", "poolside_v1", "qwen3", "step3", "step3p5")
_COHERE_THINK = ("<|START_THINKING|>", "<|END_THINKING|>")
REASONING_TAGS: Mapping[str, tuple[str, str]] = {
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "cohere_command3": _COHERE_THINK,
    "cohere_command4": _COHERE_THINK,
    "gemma4": ("<|channel>thought", "<channel|>"),
    "inkling": ("<|content_thinking|>", "<|end_message|>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "longcat": ("<longcat_think>", "</longcat_think>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "solar_open2": ("<|think:start|>", "<|think:end|>"),
    **dict.fromkeys(_WITH_THINK, _THINK),
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
