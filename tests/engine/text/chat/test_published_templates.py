"""Chat templates as models are published with, from TRL's collection: what one writes of a turn is read back as it was.

Their tokenizers are not at hand, so each template has one with a token a byte and the tokens that the template names.
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

from scorepool.engine import Tokenizer
from scorepool.engine.text.chat.chat_format import Tags
from scorepool.engine.text.chat.constraint import Constrainer
from scorepool.engine.text.chat.grammar import Function, StructuredOutputSpec
from tests.chat_formats import TOOLS

FOLDER = Path(trl.__file__).parent / "chat_templates"
ENDS = {  # the token that ends a turn, of each template
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
CALLING = set(ENDS) - {"cohere2", "gemma3", "llama3_1", "phi3"}
CONSTRAINED = {"gptoss", "qwen2_5", "qwen3", "qwen3_instruct_2507"}
SILENT = {"lfm2_v2", "qwen2_5", "qwen3_instruct_2507"}  # they write no reasoning down
ONE_TEXT = {"gptoss", "muse_glimmer"}  # before a call reasoning or content
OPENED = {"nemotron_3_nano"}  # opens the reasoning of a turn that has none otherwise than it asks for it
SPECIAL = re.compile(
    r"<[|｜][^\s<>\"']{1,40}[|｜]>|<(?:start|end)_of_turn>|<\|(?:turn|channel|tool\w*)>|<(?:turn|channel|tool\w*)\|>"
)
ORDINARY = re.compile(r"</?think>|</?tool_call>|</?arg_(?:key|value)>")
SHOWN = [{"type": "function", "function": {"description": ""} | tool["function"]} for tool in TOOLS]
GO = [{"role": "user", "content": "Go."}]
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "look", "arguments": {"place": "Zürich", "x": 3}}}


@cache
def published(name: str) -> Tokenizer:
    template = (FOLDER / f"{name}.jinja").read_text()
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=False) for text in sorted(set(ORDINARY.findall(template)))])
    special = {*SPECIAL.findall(template), ENDS[name], "<bos>"}
    backend.add_tokens([AddedToken(text, special=True) for text in sorted(special)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=ENDS[name], bos_token="<bos>")
    fast.chat_template = template
    with TemporaryDirectory() as folder:
        fast.save_pretrained(folder)
        wrapper = load_tokenizer(Path(folder))
    return Tokenizer(wrapper._tokenizer, wrapper.eos_token_ids, Tags.of(wrapper), Constrainer)


def answer_of(name: str, turn: dict[str, Any], tools: Sequence[Any]) -> tuple[list[int], list[int]]:
    """What the prompt ends with, and the turn's tokens up to its end, as the template writes them behind it."""
    tokenizer = published(name)
    prompt, opening = tokenizer.encode_chat(GO, tools)
    whole, asks_for_more = tokenizer.encode_chat([*GO, turn], tools)
    assert whole[: len(prompt)] == prompt
    answer: list[int] = []
    for token_id in whole[len(prompt) : len(whole) - len(asks_for_more)]:
        answer.append(token_id)
        if token_id in tokenizer.eos_ids:
            break
    return opening, answer


def read_back(name: str, turn: dict[str, Any], tools: Sequence[Any]) -> tuple[str, str, list[Any]]:
    """Reasoning, content and calls of a turn as the template writes it."""
    tokenizer = published(name)
    opening, answer = answer_of(name, turn, tools)
    reader = tokenizer.reader(opening)
    for token_id in answer:
        reader.read(token_id)
    reader.end()

    def said(channel: str) -> str:
        pairs = zip(answer, reader.channels, strict=True)
        return tokenizer.decode([token_id for token_id, found in pairs if found == channel]).strip()

    calls = [call for span in reader.spans for call in tokenizer.calls(span, answer, tools)]
    return said("reasoning"), said("content"), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", sorted(set(ENDS) - OPENED))
def test_a_plain_answer_is_content_alone(name: str):
    assert read_back(name, {"role": "assistant", "content": "Hello ä."}, ()) == ("", "Hello ä.", [])


@pytest.mark.parametrize("name", sorted(CALLING))
def test_a_turn_with_a_call_is_read_as_it_was_written(name: str):
    reasoning = "" if name in SILENT else "Hm."
    content = "" if name in ONE_TEXT else "I look."
    turn = {"role": "assistant", "content": content, "reasoning_content": "Hm.", "tool_calls": [CALL]}

    found = read_back(name, turn, SHOWN)

    assert found == (reasoning, content, [("look", {"place": "Zürich", "x": 3})])


@pytest.mark.parametrize("name", sorted(CONSTRAINED))
def test_a_turn_with_a_call_is_one_that_the_models_grammar_allows(name: str):
    tokenizer = published(name)
    content = "" if name in ONE_TEXT else "I look."
    turn = {"role": "assistant", "content": content, "reasoning_content": "Hm.", "tool_calls": [CALL]}
    opening, answer = answer_of(name, turn, SHOWN)
    place, x = {"type": "string"}, {"type": "integer"}
    functions = [Function(name="look", parameters={"properties": {"place": place, "x": x}})]  # llguidance keeps order

    constraint = tokenizer.constraint(StructuredOutputSpec(functions=functions), opening)

    for num_before, token_id in enumerate(answer):
        mask = constraint.token_bitmask(answer[:num_before])
        assert mask[token_id // 8] >> token_id % 8 & 1, tokenizer.decode(answer[: num_before + 1])
    assert constraint.error is None


def test_the_others_are_not_constrained_in_what_they_call():
    assert {name for name in CALLING if not published(name).why_not_constrained(calls=True)} == CONSTRAINED


def test_what_gpt_oss_said_before_a_call_goes_back_to_it():
    """Its template refuses reasoning and content together."""
    turn = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]}
    said = {"role": "tool", "tool_call_id": "abcdefghi", "name": "look", "content": "It is."}

    ids, _ = published("gptoss").encode_chat([*GO, turn, said], SHOWN)

    text = published("gptoss").decode(ids)
    assert "<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>" in text
    assert '<|message|>"It is."<|end|>' in text


def test_reasoning_is_switched_by_the_variables_of_the_template():
    qwen, gpt_oss, llama = published("qwen3"), published("gptoss"), published("llama3_1")
    assert qwen.knows_variable("enable_thinking")
    assert gpt_oss.knows_variable("reasoning_effort")
    assert not llama.knows_variable("enable_thinking")

    _, thinks = published("qwen3_8").encode_chat(GO)
    _, thinks_not = qwen.encode_chat(GO, variables={"enable_thinking": False})
    ids, _ = gpt_oss.encode_chat(GO, variables={"reasoning_effort": "high"})

    assert published("qwen3_8").reader(thinks).state == "reasoning"
    assert qwen.decode(thinks_not).endswith("<think>\n\n</think>\n\n")
    assert qwen.reader(thinks_not).state == "content"
    assert "Reasoning: high" in gpt_oss.decode(ids)
