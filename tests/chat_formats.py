"""Samples of how models of many formats answer a chat, with tokenizers of their kind for mlx-lm to inspect.

Each tokenizer has one token per byte and the format's own tokens. `FORMATS[name]` holds what a model would write.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from scorepool.engine.model.checkpoint import load_chat_codec
from scorepool.engine.text.chat.codec import ChatCodec
from scorepool.engine.text.chat.grammar import StructuredOutputSpec
from scorepool.engine.text.chat.grammar_compiler import GrammarConstraint

EOS = "<eos>"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}GENERATION_PROMPT{% endif %}{# HINT #}"
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}, "place": {"type": "string"}}},
        },
    }
    for name in ("look", "count_up")
]
DEEPSEEK_TOKENS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
LOOK = ("look", {"place": "Zürich"})
COUNT = ("count_up", {"x": 1})


@dataclass(frozen=True, kw_only=True)
class FormatSample:
    """`look` and `count` are whole calls; `both` is one call of both functions, where the format allows it."""

    look: str
    count: str
    tokens: tuple[str, ...] = ()  # of the vocabulary; those with a leading + are not special tokens
    template_hint: str = ""  # the text that mlx-lm looks for in the template
    generation_prompt: str = "<assistant>"
    reasoning: tuple[str, str] = ("<think>", "</think>")
    content: tuple[str, str] = ("", "")
    opened: str = ""  # the beginning of an answer that ends the prompt
    both: str | None = None
    invalid: str  # looks like a call and cannot be parsed


FORMATS = {
    "json_tools": FormatSample(
        tokens=("+<think>", "+</think>", "+<tool_call>", "+</tool_call>"),
        template_hint="<tool_call> tool_call.name",
        look='<tool_call>\n{"name": "look", "arguments": {"place": "Zürich"}}\n</tool_call>',
        count='<tool_call>{"name": "count_up", "arguments": {"x": 1}}</tool_call>',
        invalid='<tool_call>{"name": "look", "arguments": {</tool_call>',
    ),
    "opened": FormatSample(  # as json_tools, with a template that opens the reasoning
        tokens=("+<think>", "+</think>", "+<tool_call>", "+</tool_call>"),
        template_hint="<tool_call> tool_call.name",
        generation_prompt="<assistant><think>\n",
        reasoning=("", "</think>"),
        look='<tool_call>\n{"name": "look", "arguments": {"place": "Zürich"}}\n</tool_call>',
        count='<tool_call>{"name": "count_up", "arguments": {"x": 1}}</tool_call>',
        invalid='<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
    ),
    "qwen3_coder": FormatSample(
        tokens=("+<think>", "+</think>", "+<tool_call>", "+</tool_call>"),
        template_hint="<tool_call>\n<function=",
        look="<tool_call>\n<function=look>\n<parameter=place>\nZürich\n</parameter>\n</function>\n</tool_call>",
        count="<tool_call><function=count_up><parameter=x>1</parameter></function></tool_call>",
        invalid="<tool_call><function=look</tool_call>",
    ),
    "glm47": FormatSample(
        tokens=("+<think>", "+</think>", "<tool_call>", "</tool_call>", "+<arg_key>", "+</arg_key>"),
        template_hint="<arg_key>",
        look="<tool_call>look\n<arg_key>place</arg_key>\n<arg_value>Zürich</arg_value>\n</tool_call>",
        count="<tool_call>count_up<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>",
        invalid="<tool_call>what is this</tool_call>",
    ),
    "gemma4": FormatSample(
        tokens=("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
        template_hint="<|tool_call> <tool_call|>",
        reasoning=("<|channel>thought", "<channel|>"),
        look='<|tool_call>call:look{place:<|"|>Zürich<|"|>}<tool_call|>',
        count="<|tool_call>call:count_up{x:1}<tool_call|>",
        invalid="<|tool_call>call:look{<tool_call|>",
    ),
    "function_gemma": FormatSample(
        tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
        template_hint="<start_function_call>",
        reasoning=("", ""),
        look="<start_function_call>call:look{place:<escape>Zürich<escape>}<end_function_call>",
        count="<start_function_call>call:count_up{x:1}<end_function_call>",
        invalid="<start_function_call>call:look{place}<end_function_call>",
    ),
    "longcat": FormatSample(
        tokens=("<longcat_think>", "</longcat_think>", "<longcat_tool_call>", "</longcat_tool_call>"),
        template_hint="<longcat_tool_call>",
        reasoning=("<longcat_think>", "</longcat_think>"),
        look="<longcat_tool_call>look<longcat_arg_key>place</longcat_arg_key><longcat_arg_value>Zürich"
        "</longcat_arg_value></longcat_tool_call>",
        count="<longcat_tool_call>count_up\n<longcat_arg_key>x</longcat_arg_key>\n<longcat_arg_value>1"
        "</longcat_arg_value>\n</longcat_tool_call>",
        invalid="<longcat_tool_call>what is this</longcat_tool_call>",
    ),
    "lfm2": FormatSample(
        tokens=("+<think>", "+</think>", "<|tool_call_start|>", "<|tool_call_end|>"),
        look='<|tool_call_start|>[look(place="Zürich")]<|tool_call_end|>',
        count="<|tool_call_start|>[count_up(x=1)]<|tool_call_end|>",
        both='<|tool_call_start|>[look(place="Zürich"), count_up(x=1)]<|tool_call_end|>',
        invalid="<|tool_call_start|>look()<|tool_call_end|>",
    ),
    "kimi_k2": FormatSample(
        tokens=(
            "+<think>",
            "+</think>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        template_hint="<|tool_calls_section_begin|>",
        look="<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        '{"place": "Zürich"}<|tool_call_end|><|tool_calls_section_end|>',
        count="<|tool_calls_section_begin|><|tool_call_begin|>functions.count_up:0<|tool_call_argument_begin|>"
        '{"x": 1}<|tool_call_end|><|tool_calls_section_end|>',
        both="<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        '{"place": "Zürich"}<|tool_call_end|><|tool_call_begin|>functions.count_up:1<|tool_call_argument_begin|>'
        '{"x": 1}<|tool_call_end|><|tool_calls_section_end|>',
        invalid="<|tool_calls_section_begin|>look<|tool_calls_section_end|>",
    ),
    "kimi_k3": FormatSample(
        tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        content=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        look='<|open|>tools<|sep|><|open|>call tool="look" index="1"<|sep|><|open|>argument key="place" '
        'type="string"<|sep|>Zürich<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        count='<|open|>tools<|sep|><|open|>call tool="count_up" index="1"<|sep|><|open|>json type="object"<|sep|>'
        '{"x": 1}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        invalid="<|open|>tools<|sep|><|open|>call<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    ),
    "minimax_m2": FormatSample(
        tokens=("+<think>", "+</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
        template_hint="<minimax:tool_call>",
        look='<minimax:tool_call>\n<invoke name="look">\n<parameter name="place">Zürich</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        count='<minimax:tool_call><invoke name="count_up"><parameter name="x">1</parameter></invoke>'
        "</minimax:tool_call>",
        invalid="<minimax:tool_call><invoke</minimax:tool_call>",
    ),
    "seed_oss": FormatSample(
        tokens=("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
        template_hint="<seed:tool_call> </seed:tool_call>",
        reasoning=("<seed:think>", "</seed:think>"),
        look="<seed:tool_call>\n<function=look>\n<parameter=place>Zürich</parameter>\n</function>\n</seed:tool_call>",
        count="<seed:tool_call><function=count_up><parameter=x>1</parameter></function></seed:tool_call>",
        invalid="<seed:tool_call><function=look</seed:tool_call>",
    ),
    "mistral": FormatSample(  # only the next call or the end of the turn ends a call
        tokens=("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
        template_hint="[TOOL_CALLS]",
        reasoning=("", ""),
        look='[TOOL_CALLS]look[ARGS]{"place": "Zürich"}',
        count='[TOOL_CALLS][{"name": "count_up", "arguments": {"x": 1}}]',
        invalid='[TOOL_CALLS]look[ARGS]{"place": ',
    ),
    "mistral_list": FormatSample(  # as older models write it
        tokens=("[TOOL_CALLS]",),
        template_hint="[TOOL_CALLS]",
        reasoning=("", ""),
        look='[TOOL_CALLS] [{"name": "look", "arguments": {"place": "Zürich"}}]',
        count='[TOOL_CALLS][{"name": "count_up", "arguments": {"x": 1}}]',
        both='[TOOL_CALLS][{"name": "look", "arguments": {"place": "Zürich"}}, '
        '{"name": "count_up", "arguments": {"x": 1}}]',
        invalid='[TOOL_CALLS][{"name": "look"',
    ),
    "muse_spark": FormatSample(
        tokens=("<|start|>", "<|message|>", "<|eom|>"),
        template_hint="<atem:function_calls>",
        generation_prompt="<|start|>assistant",
        reasoning=(" to=self<|message|>", "<|eom|><|start|>assistant"),
        content=(" to=user<|message|>", "<|eom|><|start|>assistant"),
        look=' to=look<|message|><atem:function_calls><atem:invoke name="look"><atem:parameter name="place">'
        "Zürich</atem:parameter></atem:invoke></atem:function_calls><|eom|><|start|>assistant",
        count=' to=count_up<|message|><atem:function_calls><atem:invoke name="count_up"><atem:parameter name="x">1'
        "</atem:parameter></atem:invoke></atem:function_calls><|eom|><|start|>assistant",
        invalid=" to=look<|message|>place?<|eom|><|start|>assistant",
    ),
    "deepseek_v3": FormatSample(
        tokens=("+<think>", "+</think>", *DEEPSEEK_TOKENS),
        template_hint="<｜tool▁calls▁begin｜> ```json",
        look="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        '{"place": "Zürich"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        count="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>count_up\n```json\n"
        '{"x": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        both="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
        '{"place": "Zürich"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>count_up\n```json\n'
        '{"x": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        invalid="<｜tool▁calls▁begin｜>look<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": FormatSample(
        tokens=("+<think>", "+</think>", *DEEPSEEK_TOKENS),
        template_hint="<｜tool▁calls▁begin｜>",
        look='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"place": "Zürich"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        count='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>count_up<｜tool▁sep｜>{"x": 1}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        both='<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"place": "Zürich"}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>count_up<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        invalid="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "granite": FormatSample(
        tokens=("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        template_hint="<|start_of_role|> <|tool_call|>",
        reasoning=("", ""),
        look='<|tool_call|>[{"name": "look", "arguments": {"place": "Zürich"}}]',
        count='<|tool_call|>[{"name": "count_up", "arguments": {"x": 1}}]',
        both='<|tool_call|>[{"name": "look", "arguments": {"place": "Zürich"}}, '
        '{"name": "count_up", "arguments": {"x": 1}}]',
        invalid="<|tool_call|>[look]",
    ),
    "harmony": FormatSample(
        tokens=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"),
        generation_prompt="<|start|>assistant",
        reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        content=("<|channel|>final<|message|>", "<|end|><|start|>assistant"),
        look="<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
        '{"place": "Zürich"}<|call|><|start|>assistant',
        count=' to=functions.count_up<|channel|>commentary json<|message|>{"x": 1}<|call|><|start|>assistant',
        invalid="<|channel|>commentary to=functions.look<|message|>Zürich<|call|><|start|>assistant",
    ),
}

JSON_LOOK = '{"name": "look", "arguments": {"place": "Zürich"}}'
JSON_COUNT = '{"name": "count_up", "arguments": {"x": 1}}'
STEP_LOOK = (
    '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="look"><steptml:parameter name="place">Zürich'
    "</steptml:parameter></steptml:invoke><｜tool_call_end｜>"
)
STEP_COUNT = (
    '<｜tool_call_begin｜><steptml:invoke name="count_up"><steptml:parameter name="x">1</steptml:parameter>'
    "</steptml:invoke><｜tool_call_end｜>"
)
FORMATS |= {
    "cohere_command3": FormatSample(
        tokens=tuple(f"<|{side}_{part}|>" for side in ("START", "END") for part in ("THINKING", "RESPONSE", "ACTION")),
        template_hint="<|START_ACTION|> <|END_ACTION|>",
        reasoning=("<|START_THINKING|>", "<|END_THINKING|>"),
        content=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        look='<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "look", "parameters": {"place": "Zürich"}}\n]'
        "<|END_ACTION|>",
        count='<|START_ACTION|>[{"tool_call_id": "1", "tool_name": "count_up", "parameters": {"x": 1}}]<|END_ACTION|>',
        both='<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "look", "parameters": {"place": "Zürich"}},\n'
        '    {"tool_call_id": "1", "tool_name": "count_up", "parameters": {"x": 1}}\n]<|END_ACTION|>',
        invalid="<|START_ACTION|>[look]<|END_ACTION|>",
    ),
    "apertus": FormatSample(
        tokens=("<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>"),
        template_hint="<|tools_prefix|> <|tools_suffix|>",
        reasoning=("<|inner_prefix|>", "<|inner_suffix|>"),
        look='<|tools_prefix|>[{"look": {"place": "Zürich"}}]<|tools_suffix|>',
        count='<|tools_prefix|>[{"count_up": {"x": 1}}]<|tools_suffix|>',
        both='<|tools_prefix|>[{"look": {"place": "Zürich"}}, {"count_up": {"x": 1}}]<|tools_suffix|>',
        invalid="<|tools_prefix|>[look]<|tools_suffix|>",
    ),
    "internlm": FormatSample(
        tokens=("<|action_start|>", "<|action_end|>", "<|plugin|>"),
        template_hint="<|action_start|> <|plugin|>",
        reasoning=("", ""),
        look='<|action_start|><|plugin|>\n{"name": "look", "parameters": {"place": "Zürich"}}<|action_end|>',
        count='<|action_start|><|plugin|>{"name": "count_up", "parameters": {"x": 1}}<|action_end|>',
        invalid="<|action_start|><|plugin|>look<|action_end|>",
    ),
    "inkling": FormatSample(
        tokens=(
            "<|message_model|>",
            "<|content_text|>",
            "<|content_thinking|>",
            "<|content_invoke_tool_json|>",
            "<|end_message|>",
        ),
        template_hint="<|content_invoke_tool_json|>",
        generation_prompt="<|message_model|>",
        opened="<|message_model|>",
        reasoning=("<|message_model|><|content_thinking|>", "<|end_message|>"),
        content=("<|message_model|><|content_text|>", "<|end_message|>"),
        look='<|message_model|>look<|content_invoke_tool_json|>{"name": "look", "args": {"place": "Zürich"}}'
        "<|end_message|>",
        count='<|message_model|><|content_invoke_tool_json|>{"name": "count_up", "args": {"x": 1}}<|end_message|>',
        invalid="<|message_model|><|content_invoke_tool_json|>look<|end_message|>",
    ),
    "hy_v3": FormatSample(
        tokens=(
            "+<think>",
            "+</think>",
            *(f"<{end}{tag}>" for tag in ("tool_calls", "tool_call", "arg_key", "arg_value") for end in ("", "/")),
            "<tool_sep>",
        ),
        template_hint="<tool_calls> <tool_sep> <arg_key>",
        look="<tool_calls>\n<tool_call>look<tool_sep>\n<arg_key>place</arg_key>\n<arg_value>Zürich</arg_value>\n"
        "</tool_call>\n</tool_calls>",
        count="<tool_calls><tool_call>count_up<tool_sep><arg_key>x</arg_key><arg_value>1</arg_value></tool_call>"
        "</tool_calls>",
        both="<tool_calls>\n<tool_call>look<tool_sep>\n<arg_key>place</arg_key>\n<arg_value>Zürich</arg_value>\n"
        "</tool_call>\n<tool_call>count_up<tool_sep>\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
        "</tool_calls>",
        invalid="<tool_calls>what is this</tool_calls>",
    ),
    "solar_open2": FormatSample(
        tokens=(
            *(f"<|{part}|>" for part in ("think:start", "think:end", "tool_call:start", "tool_call:end")),
            *(f"<|tool_arg:{part}|>" for part in ("start", "value", "end")),
        ),
        template_hint="<|tool_call:start|> <|tool_call:end|> <|tool_arg:start|>",
        reasoning=("<|think:start|>", "<|think:end|>"),
        look="<|tool_call:start|>look\n<|tool_arg:start|>place<|tool_arg:value|>Zürich<|tool_arg:end|>\n"
        "<|tool_call:end|>",
        count="<|tool_call:start|>count_up\n<|tool_arg:start|>x<|tool_arg:value|>1<|tool_arg:end|><|tool_call:end|>",
        invalid="<|tool_call:start|>what is this<|tool_call:end|>",
    ),
    "step3": FormatSample(
        tokens=(
            "+<think>",
            "+</think>",
            *(f"<｜tool_{part}｜>" for part in ("calls_begin", "calls_end", "call_begin", "call_end", "sep")),
        ),
        template_hint="<｜tool_calls_begin｜> <steptml:invoke",
        look=f"<｜tool_calls_begin｜>{STEP_LOOK}<｜tool_calls_end｜>",
        count=f"<｜tool_calls_begin｜>{STEP_COUNT}<｜tool_calls_end｜>",
        both=f"<｜tool_calls_begin｜>{STEP_LOOK}<｜tool_sep｜>{STEP_COUNT}<｜tool_calls_end｜>",
        invalid="<｜tool_calls_begin｜>look<｜tool_calls_end｜>",
    ),
    "ernie45": FormatSample(
        tokens=("+<think>", "+</think>", "+<response>", "+</response>", "+<tool_call>", "+</tool_call>"),
        template_hint="<tool_call> tool_call.name <response>",
        content=("<response>", "</response>"),
        look=f"<tool_call>\n{JSON_LOOK}\n</tool_call>",
        count=f"<tool_call>{JSON_COUNT}</tool_call>",
        invalid='<tool_call>{"name": "look", "arguments": {</tool_call>',
    ),
}

# Calls begin with a text that is no token, at the beginning of an answer or after its reasoning.
OPENED_FORMATS = {
    "llama3_json": FormatSample(
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        template_hint='<|start_header_id|> "parameters": ',
        reasoning=("", ""),
        look='{"name": "look", "parameters": {"place": "Zürich"}}',
        count='{"name": "count_up", "parameters": {"x": 1}}',
        both='{"name": "look", "parameters": {"place": "Zürich"}}; {"name": "count_up", "parameters": {"x": 1}}',
        invalid='{"name": "look", "parameters": {"place": "Zürich"}',
    ),
    "nemotron_json": FormatSample(
        tokens=("+<think>", "+</think>"),
        template_hint="<TOOLCALL> </TOOLCALL>",
        look='<TOOLCALL>[{"name": "look", "arguments": {"place": "Zürich"}}]</TOOLCALL>',
        count='<TOOLCALL>[{"name": "count_up", "arguments": {"x": 1}}]</TOOLCALL>',
        both='<TOOLCALL>[{"name": "look", "arguments": {"place": "Zürich"}}, '
        '{"name": "count_up", "arguments": {"x": 1}}]</TOOLCALL>',
        invalid='<TOOLCALL>[{"name": "look", "arguments": ]</TOOLCALL>',
    ),
    "jamba": FormatSample(
        template_hint="<tool_calls> </tool_calls>",
        reasoning=("", ""),
        look='<tool_calls>[\n{"name": "look", "arguments": {"place": "Zürich"}}\n]</tool_calls>',
        count='<tool_calls>[{"name": "count_up", "arguments": {"x": 1}}]</tool_calls>',
        both='<tool_calls>[{"name": "look", "arguments": {"place": "Zürich"}},\n'
        '{"name": "count_up", "arguments": {"x": 1}}]</tool_calls>',
        invalid="<tool_calls>[look]</tool_calls>",
    ),
    "phi4_mini_json": FormatSample(
        template_hint="functools[",
        reasoning=("", ""),
        look='functools[{"name": "look", "arguments": {"place": "Zürich"}}]',
        count='functools[{"name": "count_up", "arguments": {"x": 1}}]',
        both='functools[{"name": "look", "arguments": {"place": "Zürich"}}, '
        '{"name": "count_up", "arguments": {"x": 1}}]',
        invalid="functools[look]",
    ),
    "functionary": FormatSample(
        tokens=("<|start_header_id|>", "<|end_header_id|>"),
        template_hint="<|start_header_id|> <function=example_function_name>",
        reasoning=("", ""),
        look='<function=look>{"place": "Zürich"}</function>',
        count='<function=count_up>{"x": 1}</function>',
        both='<function=look>{"place": "Zürich"}</function><function=count_up>{"x": 1}</function>',
        invalid='<function=look>{"place": "Zürich"}',
    ),
    "xlam": FormatSample(
        template_hint='{"name": "tool_call_name", "arguments"',
        reasoning=("", ""),
        look=f"[{JSON_LOOK}]",
        count=f"[{JSON_COUNT}]",
        both=f"[{JSON_LOOK}, {JSON_COUNT}]",
        invalid='[{"name": "look"}',
    ),
    "llama4_pythonic": FormatSample(
        tokens=("<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>"),
        template_hint="<|header_start|> [func_name1(",
        reasoning=("", ""),
        look='[look(place="Zürich")]',
        count="[count_up(x=1)]",
        both='[look(place="Zürich"), count_up(x=1)]',
        invalid="[look(place)]",
    ),
    "pythonic": FormatSample(
        tokens=("<|start_header_id|>", "<|end_header_id|>"),
        template_hint="[func_name1(",
        reasoning=("", ""),
        look="[look(place='Zürich')]",
        count="[count_up(x=1)]",
        both="[look(place='Zürich'), count_up(x=1)]",
        invalid="[look]",
    ),
}

DSML_LOOK = (
    '<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="place" string="true">Zürich</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
)
DSML_COUNT = (
    '<｜DSML｜invoke name="count_up">\n<｜DSML｜parameter name="x" string="false">1</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
)
M3 = "]<]minimax[>["
M3_LOOK = f'{M3}<invoke name="look">{M3}<place>Zürich{M3}</place>{M3}</invoke>\n'
M3_COUNT = f'{M3}<invoke name="count_up">{M3}<x>1{M3}</x>{M3}</invoke>\n'
# Calls begin with a text that is no token of its own, anywhere in an answer.
TEXT_FORMATS = {
    "deepseek_v32": FormatSample(
        tokens=("+<think>", "+</think>", "+｜DSML｜"),
        template_hint="｜DSML｜ function_calls>",
        look=f"<｜DSML｜function_calls>\n{DSML_LOOK}</｜DSML｜function_calls>",
        count=f"<｜DSML｜function_calls>\n{DSML_COUNT}</｜DSML｜function_calls>",
        both=f"<｜DSML｜function_calls>\n{DSML_LOOK}{DSML_COUNT}</｜DSML｜function_calls>",
        invalid="<｜DSML｜function_calls>\nlook\n</｜DSML｜function_calls>",
    ),
    "deepseek_v4": FormatSample(
        tokens=("+<think>", "+</think>", "｜DSML｜"),
        template_hint="｜DSML｜ tool_calls>",
        look=f"<｜DSML｜tool_calls>\n{DSML_LOOK}</｜DSML｜tool_calls>",
        count=f"<｜DSML｜tool_calls>\n{DSML_COUNT}</｜DSML｜tool_calls>",
        both=f"<｜DSML｜tool_calls>\n{DSML_LOOK}{DSML_COUNT}</｜DSML｜tool_calls>",
        invalid="<｜DSML｜tool_calls>\nlook\n</｜DSML｜tool_calls>",
    ),
    "functionary_v32": FormatSample(
        tokens=("<|start_header_id|>", "<|end_header_id|>"),
        template_hint="<|start_header_id|> >>>all",
        generation_prompt="<assistant>\n\n>>>",
        opened=">>>",
        reasoning=("", ""),
        content=(">>>all\n", ""),
        look='>>>look\n{"place": "Zürich"}',
        count='>>>count_up\n{"x": 1}',
        both='>>>look\n{"place": "Zürich"}>>>count_up\n{"x": 1}',
        invalid='>>>look\n{"place": "Zürich"',
    ),
    "minimax_m3": FormatSample(
        tokens=("<mm:think>", "</mm:think>", "]<]minimax[>["),
        template_hint="]<]minimax[>[ <tool_call>",
        reasoning=("<mm:think>", "</mm:think>"),
        look=f"{M3}<tool_call>\n{M3_LOOK}{M3}</tool_call>",
        count=f"{M3}<tool_call>{M3_COUNT}{M3}</tool_call>",
        both=f"{M3}<tool_call>\n{M3_LOOK}{M3_COUNT}{M3}</tool_call>",
        invalid=f"{M3}<tool_call>\n{M3}</x>{M3}</tool_call>",
    ),
    "minicpm5": FormatSample(
        tokens=("+<think>", "+</think>"),
        template_hint='<function name=" <param name="',
        look='<function name="look"><param name="place">Zürich</param></function>',
        count='<function name="count_up"><param name="x">1</param></function>',
        both='<function name="look"><param name="place"><![CDATA[Zürich]]></param></function>'
        '<function name="count_up"><param name="x">1</param></function>',
        invalid='<function name="fly"></function>',
    ),
    "hunyuan_a13b": FormatSample(
        template_hint="<tool_calls> <answer>",
        reasoning=("", ""),
        look=f"<tool_calls>[{JSON_LOOK}]</tool_calls>",
        count=f"<tool_calls>[{JSON_COUNT}]</tool_calls>",
        both=f"<tool_calls>[{JSON_LOOK}, {JSON_COUNT}]</tool_calls>",
        invalid="<tool_calls>[look]</tool_calls>",
    ),
    "granite-20b-fc": FormatSample(
        template_hint="<function_call> <|function_call_library|>",
        reasoning=("", ""),
        look=f"<function_call> {JSON_LOOK}",
        count=f"<function_call>{JSON_COUNT}",
        both=f"<function_call> {JSON_LOOK}\n<function_call> {JSON_COUNT}",
        invalid="<function_call> look",
    ),
    "gigachat3": FormatSample(
        tokens=("<|message_sep|>\n\n", "<|role_sep|>\n"),
        template_hint="<|role_sep|> function call",
        generation_prompt="assistant<|role_sep|>\n",
        reasoning=("", ""),
        look=f"<|message_sep|>\n\nfunction call<|role_sep|>\n{JSON_LOOK}<|message_sep|>\n\n",
        count=f"<|message_sep|>\n\nfunction call<|role_sep|>\n{JSON_COUNT}",
        both=f"<|message_sep|>\n\nfunction call<|role_sep|>\n{JSON_LOOK}<|message_sep|>\n\n"
        f"function call<|role_sep|>\n{JSON_COUNT}",
        invalid="<|message_sep|>\n\nfunction call<|role_sep|>\nlook",
    ),
    "olmo3": FormatSample(
        template_hint="<function_calls> </function_calls>",
        reasoning=("", ""),
        look='<function_calls>look(place="Zürich")</function_calls>',
        count="<function_calls>\ncount_up(x=1)\n</function_calls>",
        both='<function_calls>look(place="Zürich")\ncount_up(x=1)</function_calls>',
        invalid="<function_calls>look(place)</function_calls>",
    ),
}
SAMPLES = FORMATS | OPENED_FORMATS | TEXT_FORMATS


@cache
def chat_codec_of(name: str) -> ChatCodec:
    """Build the codec as the engine does when it loads a model of this format."""
    sample = SAMPLES[name]
    with TemporaryDirectory() as folder:
        save_tokenizer(sample, sample.template_hint, Path(folder))
        return load_chat_codec(Path(folder), {})


def save_tokenizer(sample: FormatSample, template_hint: str, folder: Path, training: Sequence[str] = ()) -> None:
    """Write a tokenizer of this kind, with a chat template. It learns tokens of several bytes from `training`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({piece: token_id for token_id, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if training:
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator(training, trainer)
    added = [AddedToken(text.removeprefix("+"), special=not text.startswith("+")) for text in sample.tokens]
    backend.add_tokens([*added, AddedToken(EOS, special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)
    template = TEMPLATE.replace("GENERATION_PROMPT", sample.generation_prompt)
    fast.chat_template = template.replace("HINT", template_hint)
    fast.save_pretrained(folder)


def compile_constraint(
    chat: ChatCodec, spec: StructuredOutputSpec, generation_prompt: Sequence[int] | None
) -> GrammarConstraint:
    """Return the constraint of one answer, compiled. Raises InvalidRequest."""
    (constraint,) = chat.grammar_compiler.constraints(spec, generation_prompt)
    constraint.compile().result(60)
    return constraint


def ids_of(name: str, text: str) -> list[int]:
    return chat_codec_of(name).tokenizer.encode(text, add_bos=False)[0]


def generation_prompt_of(name: str) -> list[int]:
    return chat_codec_of(name).encode([{"role": "user", "content": "Go."}], TOOLS)[1]


def names_and_arguments(calls: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]
