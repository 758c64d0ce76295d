"""A chat is written by the model's own template: tools, calls and what a template opens."""

from typing import Any

import pytest

from engine import Refused, Tokenizer
from tests.chat_formats import TOOLS, tokenizer_of
from tests.tiny_models import EOS, build_tokenizer

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"place": "Zürich"}}}
CHAT = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]


def with_template(template: str) -> Tokenizer:
    fast = build_tokenizer()
    fast.chat_template = template
    return Tokenizer(fast, [EOS])


def written(template: str, chat: list[dict[str, Any]] = CHAT) -> str:
    tokenizer = with_template(template)
    return tokenizer.decode(tokenizer.encode_chat(chat)[0])


def test_arguments_are_an_object_where_a_template_reads_one():
    one = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.place }}{% endfor %}{% endfor %}"

    assert written(one) == "Zürich"


def test_arguments_are_json_where_a_template_appends_them():
    one = "{% for m in messages %}{% for c in m.tool_calls %}{{ 'f' + c.function.arguments }}{% endfor %}{% endfor %}"

    assert written(one) == 'f{"place": "Z\\u00fcrich"}'


def test_a_template_that_cannot_write_a_message_is_the_callers_error():
    with pytest.raises(Refused, match="cannot write"):
        written("{{ messages[0].content + 1 }}")


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        ("{{ messages[0].content }}{% if add_generation_prompt %}<|a|><think>\n{% endif %}", "<|a|><think>\n"),
        ("{{ messages[0].content }}<|end|>{% if not add_generation_prompt %}<|eot|>{% endif %}", ""),
        ("{{ messages[0].content }}{% if add_generation_prompt %}<pad>a{% else %}<eos>{% endif %}", "<pad>a"),
    ],
)
def test_the_opening_is_what_only_the_generation_prompt_has(template: str, opening: str):
    tokenizer = with_template(template)

    ids, found = tokenizer.encode_chat([{"role": "user", "content": "<think>"}])

    assert tokenizer.decode(found).endswith(opening)
    assert tokenizer.decode(ids).endswith(opening)
    assert len(tokenizer.decode(found)) <= len(opening) + 2  # a token may begin in what comes before


def test_a_model_says_why_it_calls_no_functions():
    assert tokenizer_of("json_tools").why_no_tools() is None
    assert "no place" in (with_template("{{ messages[0].content }}").why_no_tools() or "")
    assert "no format" in (with_template("{{ messages[0].content }}{{ tools }}").why_no_tools() or "")


def test_tools_are_written():
    tokenizer = tokenizer_of("json_tools")

    ids, _ = tokenizer.encode_chat(CHAT[:1], TOOLS)

    assert '"name": "count_up"' in tokenizer.decode(ids)
