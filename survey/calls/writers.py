"""Write turns as the chat templates of models do, from their published templates and documentation.

Nothing here is shared with the code that reads them. `tests/survey/test_calls.py` compares them with templates.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_M3 = "]<]minimax[>["
Calls = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    calls: Callable[[Calls], str]
    sample: str  # the format's name in tests/chat_formats.py: its tokens, and its markers around reasoning and content
    is_opened: bool = False  # calls stand at the beginning of an answer only
    is_one: bool = False  # an answer has one call
    is_text: bool = False  # no format: what a degraded model writes, which is read where a setting asks for it
    cannot_write: str = ""  # a regular expression: strings with a match have two readings in the format


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _raw(value: Any) -> str:
    """Write a string as it is, and other values as JSON."""
    return value if isinstance(value, str) else to_json(value)


def _as_jinja(value: Any) -> str:
    """Write a string as it is, lists and objects as JSON, and other values as Python prints them."""
    return to_json(value) if isinstance(value, dict | list) else str(value)


def _objects(calls: Calls, arguments: str = "arguments") -> list[str]:
    return [f'{{"name": {to_json(name)}, "{arguments}": {to_json(given)}}}' for name, given in calls]


def _hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in _objects(calls))


def _qwen3_coder(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        pairs = "".join(f"<parameter={key}>\n{_as_jinja(value)}\n</parameter>\n" for key, value in arguments.items())
        written.append(f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>")
    return "\n".join(written)


def _seed_oss(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        pairs = "".join(f"<parameter={key}>{_raw(value)}</parameter>\n" for key, value in arguments.items())
        written.append(f"<seed:tool_call>\n<function={name}>\n{pairs}</function>\n</seed:tool_call>")
    return "\n".join(written)


def _minimax_m2(calls: Calls) -> str:
    written = ""
    for name, arguments in calls:
        pairs = "".join(f'<parameter name="{key}">{_raw(value)}</parameter>\n' for key, value in arguments.items())
        written += f'<invoke name="{name}">\n{pairs}</invoke>\n'
    return f"<minimax:tool_call>\n{written}</minimax:tool_call>"


def _glm45(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value)}</arg_value>\n" for key, value in arguments.items()
        )
        written.append(f"<tool_call>{name}\n{pairs}</tool_call>")
    return "\n".join(written)


def _in_one_line(calls: Calls, prefix: str) -> str:
    """Write GLM 4.7's and LongCat's calls."""
    key_tag, value_tag, written = f"{prefix}arg_key", f"{prefix}arg_value", ""
    for name, arguments in calls:
        pairs = "".join(
            f"<{key_tag}>{key}</{key_tag}><{value_tag}>{_raw(value)}</{value_tag}>" for key, value in arguments.items()
        )
        written += f"<{prefix}tool_call>{name}{pairs}</{prefix}tool_call>"
    return written


def _gemma_value(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case bool():
            return "true" if value else "false"
        case dict():
            pairs = sorted(value.items(), key=lambda pair: pair[0].lower())
            return f"{{{','.join(f'{key}:{_gemma_value(each, quote)}' for key, each in pairs)}}}"
        case list():
            return f"[{','.join(_gemma_value(each, quote) for each in value)}]"
        case _:
            return str(value)  # None too, as Jinja prints it


def _gemma(calls: Calls, start: str, end: str, quote: str) -> str:
    return "".join(f"{start}call:{name}{_gemma_value(arguments, quote)}{end}" for name, arguments in calls)


def _python_value(value: Any) -> str:
    match value:
        case str():
            return to_json(value)  # JSON's strings are Python's
        case dict():
            return f"{{{', '.join(f'{to_json(key)}: {_python_value(each)}' for key, each in value.items())}}}"
        case list():
            return f"[{', '.join(map(_python_value, value))}]"
        case _:
            return repr(value)


def _python_calls(calls: Calls) -> list[str]:
    return [
        f"{name}({', '.join(f'{key}={_python_value(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]


def _pythonic(calls: Calls) -> str:
    return f"[{', '.join(_python_calls(calls))}]"


def _kimi_k2(calls: Calls) -> str:
    written = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{to_json(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{written}<|tool_calls_section_end|>"


def _kimi_k3(calls: Calls) -> str:
    written = ""
    for index, (name, arguments) in enumerate(calls, 1):
        pairs = ""
        for key, value in arguments.items():
            kind, text = ("string", value) if isinstance(value, str) else ("json", to_json(value))
            escaped = key.replace("&", "&amp;").replace('"', "&quot;")
            pairs += f'<|open|>argument key="{escaped}" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'
        written += f'<|open|>call tool="{name}" index="{index}"<|sep|>{pairs}<|close|>call<|sep|>'
    return f"<|open|>tools<|sep|>{written}<|close|>tools<|sep|>"


def _minimax_m3_value(value: Any) -> str:
    match value:
        case dict():
            return "".join(f"{_M3}<{key}>{_minimax_m3_value(each)}{_M3}</{key}>" for key, each in value.items())
        case list():
            return "".join(f"{_M3}<item>{_minimax_m3_value(each)}{_M3}</item>" for each in value)
        case _:
            return _raw(value)


def _minimax_m3(calls: Calls) -> str:
    written = "".join(
        f'{_M3}<invoke name="{name}">{_minimax_m3_value(arguments)}{_M3}</invoke>\n' for name, arguments in calls
    )
    return f"{_M3}<tool_call>\n{written}{_M3}</tool_call>"


def _hy_v3(calls: Calls) -> str:
    written = ""
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_raw(value)}</arg_value>\n" for key, value in arguments.items()
        )
        written += f"<tool_call>{name}<tool_sep>\n{pairs}</tool_call>\n"
    return f"<tool_calls>\n{written}</tool_calls>"


def _solar_open2(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        pairs = "".join(
            f"<|tool_arg:start|>{key}<|tool_arg:value|>{_raw(value)}<|tool_arg:end|>\n"
            for key, value in arguments.items()
        )
        written.append(f"<|tool_call:start|>{name}\n{pairs}<|tool_call:end|>")
    return "\n".join(written)


def _minicpm5(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        values = {key: _raw(value) for key, value in arguments.items()}
        values = {key: f"<![CDATA[{each}]]>" if re.search(r"[<&\n]", each) else each for key, each in values.items()}
        pairs = "".join(f'<param name="{key}">{each}</param>' for key, each in values.items())
        written.append(f'<function name="{name}">{pairs}</function>')
    return "\n".join(written)


def _step3(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        pairs = "".join(
            f'<steptml:parameter name="{key}">{_raw(value)}</steptml:parameter>' for key, value in arguments.items()
        )
        invoked = f'<steptml:invoke name="{name}">{pairs}</steptml:invoke>'
        written.append(f"<｜tool_call_begin｜>function<｜tool_sep｜>{invoked}<｜tool_call_end｜>")
    return f"<｜tool_calls_begin｜>{''.join(written)}<｜tool_calls_end｜>"


def _deepseek_v3(calls: Calls) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{to_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Calls) -> str:
    written = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{to_json(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


def _dsml(calls: Calls, block: str) -> str:
    written = ""
    for name, arguments in calls:
        pairs = "\n".join(
            f'<｜DSML｜parameter name="{key}" string="{kind}">{_raw(value)}</｜DSML｜parameter>'
            for key, value in arguments.items()
            for kind in ["true" if isinstance(value, str) else "false"]
        )
        written += f'<｜DSML｜invoke name="{name}">\n{pairs}\n</｜DSML｜invoke>\n'
    return f"\n\n<｜DSML｜{block}>\n{written}</｜DSML｜{block}>"


def _harmony(calls: Calls) -> str:
    return "".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{to_json(arguments)}<|call|><|start|>assistant"
        for name, arguments in calls
    )


def _list_between(before: str, after: str) -> Callable[[Calls], str]:
    return lambda calls: f"{before}[{', '.join(_objects(calls))}]{after}"


def _cohere(calls: Calls) -> str:
    objects = (
        f'    {{"tool_call_id": "{index}", "tool_name": {to_json(name)}, "parameters": {to_json(given)}}}'
        for index, (name, given) in enumerate(calls)
    )
    joined = ",\n".join(objects)
    return f"<|START_ACTION|>[\n{joined}\n]<|END_ACTION|>"


def _calling_tool(calls: Calls) -> str:
    return "".join(f"\n[Calling tool: {name}({to_json(arguments)})]" for name, arguments in calls)


def _tool_call_text(calls: Calls) -> str:
    return "".join(f"\n[TOOL_CALL]\n{each}\n[/TOOL_CALL]" for each in _objects(calls))


def _fenced(calls: Calls) -> str:
    return "".join(f"\n```json\n{each}\n```" for each in _objects(calls))


_PARAMETER_END = r"</parameter>\s*(<parameter|</function|</invoke)"
_DSML_END = r"</｜DSML｜(parameter>\s*(<|$)|\w+_calls>)"
_PAIR_END = r"</(longcat_)?arg_value>\s*(<|$)"
_QUOTE_END = r'(<\|"\|>|<escape>)\s*([,\]})=:]|$)'
_OF_GIGACHAT = "<|message_sep|>\n\nfunction call<|role_sep|>\n"
WRITERS = {
    "apertus": Writer(
        calls=lambda calls: (
            f"<|tools_prefix|>[{', '.join(to_json({name: given}) for name, given in calls)}]<|tools_suffix|>"
        ),
        sample="apertus",
    ),
    "cohere_command3": Writer(calls=_cohere, sample="cohere_command3"),
    "deepseek_v3": Writer(calls=_deepseek_v3, sample="deepseek_v3"),
    "deepseek_v31": Writer(calls=_deepseek_v31, sample="deepseek_v31"),
    "deepseek_v32": Writer(
        calls=lambda calls: _dsml(calls, "function_calls"), sample="deepseek_v32", cannot_write=_DSML_END
    ),
    "deepseek_v4": Writer(calls=lambda calls: _dsml(calls, "tool_calls"), sample="deepseek_v4", cannot_write=_DSML_END),
    "ernie45": Writer(
        calls=lambda calls: "".join(f"\n<tool_call>\n{each}\n</tool_call>\n" for each in _objects(calls)),
        sample="ernie45",
    ),
    "functiongemma": Writer(
        calls=lambda calls: _gemma(calls, "<start_function_call>", "<end_function_call>", "<escape>"),
        sample="function_gemma",
        cannot_write=_QUOTE_END,
    ),
    "functionary": Writer(
        calls=lambda calls: "".join(f"<function={name}>{to_json(given)}</function>" for name, given in calls),
        sample="functionary",
        is_opened=True,
    ),
    "functionary_v32": Writer(
        calls=lambda calls: "".join(f">>>{name}\n{to_json(given)}" for name, given in calls), sample="functionary_v32"
    ),
    "gemma4": Writer(
        calls=lambda calls: _gemma(calls, "<|tool_call>", "<tool_call|>", '<|"|>'),
        sample="gemma4",
        cannot_write=_QUOTE_END,
    ),
    "gigachat3": Writer(
        calls=lambda calls: _OF_GIGACHAT + _objects(calls)[0] + "<|message_sep|>\n\n", sample="gigachat3", is_one=True
    ),
    "glm45": Writer(calls=_glm45, sample="glm47", cannot_write=_PAIR_END),
    "glm47": Writer(calls=lambda calls: _in_one_line(calls, ""), sample="glm47", cannot_write=_PAIR_END),
    "granite": Writer(calls=_list_between("<|tool_call|>", ""), sample="granite"),
    "granite-20b-fc": Writer(
        calls=lambda calls: "\n".join(f"<function_call> {each}" for each in _objects(calls)),
        sample="granite-20b-fc",
    ),
    "hermes": Writer(calls=_hermes, sample="json_tools"),
    "hunyuan_a13b": Writer(
        calls=_list_between("<tool_calls>", "</tool_calls>"), sample="hunyuan_a13b", cannot_write="</tool_calls>"
    ),
    "hy_v3": Writer(calls=_hy_v3, sample="hy_v3", cannot_write=_PAIR_END),
    "inkling": Writer(
        calls=lambda calls: "".join(
            f"<|message_model|><|content_invoke_tool_json|>{each}<|end_message|>" for each in _objects(calls, "args")
        ),
        sample="inkling",
    ),
    "internlm": Writer(
        calls=lambda calls: "\n".join(
            f"<|action_start|><|plugin|>\n{each}<|action_end|>" for each in _objects(calls, "parameters")
        ),
        sample="internlm",
    ),
    "jamba": Writer(calls=_list_between("<tool_calls>", "</tool_calls>"), sample="jamba", is_opened=True),
    "kimi_k2": Writer(calls=_kimi_k2, sample="kimi_k2"),
    "lfm2": Writer(calls=lambda calls: f"<|tool_call_start|>{_pythonic(calls)}<|tool_call_end|>", sample="lfm2"),
    "llama3_json": Writer(
        calls=lambda calls: "; ".join(_objects(calls, "parameters")), sample="llama3_json", is_opened=True
    ),
    "llama4_pythonic": Writer(calls=_pythonic, sample="llama4_pythonic", is_opened=True),
    "longcat": Writer(calls=lambda calls: _in_one_line(calls, "longcat_"), sample="longcat", cannot_write=_PAIR_END),
    "minimax_m2": Writer(calls=_minimax_m2, sample="minimax_m2", cannot_write=_PARAMETER_END),
    "minicpm5": Writer(calls=_minicpm5, sample="minicpm5", cannot_write=r"</function>|</param>|<function name="),
    "kimi_k3": Writer(calls=_kimi_k3, sample="kimi_k3", cannot_write=r"<\|(open|close|sep)\|>"),
    "minimax_m3": Writer(calls=_minimax_m3, sample="minimax_m3", cannot_write=re.escape(_M3)),
    "mistral": Writer(
        calls=lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{to_json(given)}" for name, given in calls),
        sample="mistral",
    ),
    "mistral, older": Writer(calls=_list_between("[TOOL_CALLS] ", ""), sample="mistral_list"),
    "nemotron_json": Writer(calls=_list_between("<TOOLCALL>", "</TOOLCALL>"), sample="nemotron_json", is_opened=True),
    "olmo3": Writer(
        calls=lambda calls: f"<function_calls>{chr(10).join(_python_calls(calls))}</function_calls>",
        sample="olmo3",
        cannot_write="</function_calls>",
    ),
    "openai": Writer(calls=_harmony, sample="harmony"),
    "phi4_mini_json": Writer(calls=_list_between("functools", ""), sample="phi4_mini_json", is_opened=True),
    "pythonic": Writer(calls=_pythonic, sample="pythonic", is_opened=True),
    "qwen3_coder": Writer(calls=_qwen3_coder, sample="qwen3_coder", cannot_write=_PARAMETER_END),
    "[Calling tool: ...]": Writer(calls=_calling_tool, sample="json_tools", is_text=True),
    "[TOOL_CALL]": Writer(calls=_tool_call_text, sample="json_tools", is_text=True),
    "fenced JSON": Writer(calls=_fenced, sample="json_tools", is_text=True),
    "seed_oss": Writer(calls=_seed_oss, sample="seed_oss", cannot_write=_PARAMETER_END),
    "solar_open2": Writer(calls=_solar_open2, sample="solar_open2", cannot_write=_PAIR_END),
    "step3": Writer(calls=_step3, sample="step3", cannot_write=_PARAMETER_END),
    "xlam": Writer(calls=_list_between("", ""), sample="xlam", is_opened=True),
}
