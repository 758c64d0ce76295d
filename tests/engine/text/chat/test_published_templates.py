"""Chat templates of published models, from TRL's collection: a rendered turn is parsed back into the same turn.

Their tokenizers are not available here, so each template gets one with a token per byte and the tokens that it names.
"""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trl
from mlx_lm.utils import load_tokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from scorepool.engine import ChatCodec, Tokenizer
from scorepool.engine.text.chat.chat_format import ChatTags
from scorepool.engine.text.chat.grammar import Function, StructuredOutputSpec
from tests.chat_formats import TOOLS, compile_constraint

FOLDER = Path(trl.__file__).parent / "chat_templates"
EOS_OF = {  # each template's token that ends a turn
    "cohere2": "<|END_OF_TURN_TOKEN|>",
    "gemma3": "<end_of_turn>",
    "gemma4_v3": "<turn|>",
    "glm4moe": "<|user|>",
    "gptoss": "<|call|>",
    "lfm2_2_5": "<|im_end|>",
    "lfm2_v2": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "muse_glimmer": "<|eot|>",
    "nemotron_3_nano": "<|im_end|>",
    "phi3": "<|end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "qwen3_8": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
}
CALLING = set(EOS_OF) - {"cohere2", "gemma3", "phi3"}
CONSTRAINED = CALLING - {"muse_glimmer"}
NO_REASONING = {"lfm2_v2", "llama3_1", "qwen2_5", "qwen3_instruct_2507"}  # these drop a turn's reasoning
ONE_TEXT = {"gptoss", "llama3_1", "muse_glimmer"}  # these render reasoning or content before a call, or neither
INCONSISTENT = {"nemotron_3_nano"}  # renders a turn without reasoning differently from its generation prompt
SPECIAL = re.compile(
    r"<[|｜][^\s<>\"']{1,40}[|｜]>|<(?:start|end)_of_turn>|<\|(?:turn|channel|tool\w*)>|<(?:turn|channel|tool\w*)\|>"
)
ORDINARY = re.compile(r"</?think>|</?tool_call>|</?arg_(?:key|value)>")
RENDERED_TOOLS = [{"type": "function", "function": {"description": ""} | tool["function"]} for tool in TOOLS]
GO = [{"role": "user", "content": "Go."}]
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "look", "arguments": {"place": "Zürich", "x": 3}}}


@cache
def published(name: str) -> ChatCodec:
    template = (FOLDER / f"{name}.jinja").read_text()
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=False) for text in sorted(set(ORDINARY.findall(template)))])
    special = {*SPECIAL.findall(template), EOS_OF[name], "<bos>"}
    backend.add_tokens([AddedToken(text, special=True) for text in sorted(special)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS_OF[name], bos_token="<bos>")
    fast.chat_template = template
    with TemporaryDirectory() as folder:
        fast.save_pretrained(folder)
        wrapper = load_tokenizer(Path(folder))
    return ChatCodec(Tokenizer(wrapper._tokenizer, wrapper.eos_token_ids), ChatTags.from_mlx_lm(wrapper))


def answer_of(name: str, turn: dict[str, Any], tools: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return the generation prompt, and the turn's tokens up to its end, as the template renders them after it."""
    chat = published(name)
    prompt, generation_prompt = chat.encode(GO, tools)
    whole, next_generation_prompt = chat.encode([*GO, turn], tools)
    assert whole[: len(prompt)] == prompt
    answer: list[int] = []
    for token_id in whole[len(prompt) : len(whole) - len(next_generation_prompt)]:
        answer.append(token_id)
        if token_id in chat.tokenizer.eos_ids:
            break
    return generation_prompt, answer


def parse_back(name: str, turn: dict[str, Any], tools: Sequence[Any]) -> tuple[str, str, list[Any]]:
    """Render a turn and parse it: return its reasoning, content and calls."""
    chat = published(name)
    generation_prompt, answer = answer_of(name, turn, tools)
    parser = chat.output_parser(generation_prompt)
    for token_id in answer:
        parser.read(token_id)
    parser.end()

    def text_of(channel: str) -> str:
        pairs = zip(answer, parser.channels, strict=True)
        return chat.tokenizer.decode([token_id for token_id, found in pairs if found == channel]).strip()

    calls = [call for span in parser.spans for call in chat.parse_tool_calls(span, answer, tools)]
    return text_of("reasoning"), text_of("content"), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", sorted(set(EOS_OF) - INCONSISTENT))
def test_a_plain_answer_is_content_alone(name: str):
    assert parse_back(name, {"role": "assistant", "content": "Hello ä."}, ()) == ("", "Hello ä.", [])


@pytest.mark.parametrize("name", sorted(CALLING))
def test_a_turn_with_a_call_is_parsed_as_it_was_rendered(name: str):
    reasoning = "" if name in NO_REASONING else "Hm."
    content = "" if name in ONE_TEXT else "I look."
    turn = {"role": "assistant", "content": content, "reasoning_content": "Hm.", "tool_calls": [CALL]}

    found = parse_back(name, turn, RENDERED_TOOLS)

    assert found == (reasoning, content, [("look", {"place": "Zürich", "x": 3})])


@pytest.mark.parametrize("name", sorted(CONSTRAINED - {"nemotron_3_nano"}))  # it ends a turn with a line break
def test_the_models_grammar_allows_a_rendered_turn_with_a_call(name: str):
    chat = published(name)
    content = "" if name in ONE_TEXT else "I look."
    turn = {"role": "assistant", "content": content, "reasoning_content": "Hm.", "tool_calls": [CALL]}
    generation_prompt, answer = answer_of(name, turn, RENDERED_TOOLS)
    if name == "gemma4_v3":  # renders content after the calls
        answer = answer[: answer.index(chat.tokenizer.encode("<tool_call|>", add_bos=False)[0][0]) + 1]
    place, x = {"type": "string"}, {"type": "integer"}
    functions = [Function(name="look", parameters={"properties": {"place": place, "x": x}})]  # in order

    constraint = compile_constraint(chat, StructuredOutputSpec(functions=functions), generation_prompt)

    for num_before, token_id in enumerate(answer):
        bitmask = constraint.token_bitmask(answer[:num_before])
        assert bitmask[token_id // 8] >> token_id % 8 & 1, chat.tokenizer.decode(answer[: num_before + 1])
    assert constraint.error is None


def test_only_the_calls_of_known_json_formats_are_constrained():
    compilers = {name: published(name).grammar_compiler for name in CALLING}

    constrained = {name for name, compiler in compilers.items() if not compiler.unsupported_reason(True)}

    assert constrained == CONSTRAINED


def test_content_before_a_call_of_gpt_oss_is_rendered_as_reasoning():
    """The template refuses reasoning and content together."""
    turn = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]}
    tool_message = {"role": "tool", "tool_call_id": "abcdefghi", "name": "look", "content": "It is."}

    chat = published("gptoss")

    ids, _ = chat.encode([*GO, turn, tool_message], RENDERED_TOOLS)

    text = chat.tokenizer.decode(ids)
    assert "<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>" in text
    assert '<|message|>"It is."<|end|>' in text


def test_variables_of_the_template_switch_reasoning():
    qwen, gpt_oss, llama = published("qwen3"), published("gptoss"), published("llama3_1")
    assert qwen.template.accepts_variable("enable_thinking")
    assert gpt_oss.template.accepts_variable("reasoning_effort")
    assert not llama.template.accepts_variable("enable_thinking")

    _, thinking = published("qwen3_8").encode(GO)
    _, not_thinking = qwen.encode(GO, variables={"enable_thinking": False})
    ids, _ = gpt_oss.encode(GO, variables={"reasoning_effort": "high"})

    assert published("qwen3_8").output_parser(thinking).state == "reasoning"
    assert qwen.tokenizer.decode(not_thinking).endswith("<think>\n\n</think>\n\n")
    assert qwen.output_parser(not_thinking).state == "content"
    assert "Reasoning: high" in gpt_oss.tokenizer.decode(ids)
