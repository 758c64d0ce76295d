"""A chat is written by the model's own template: tools, calls and what a template opens."""

from typing import Any

import pytest

from scorepool.engine import InvalidRequest, Tokenizer
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
    with pytest.raises(InvalidRequest, match="cannot write"):
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


THINKS = (
    "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}<pad>{% endif %}"
    "{% if add_generation_prompt %}{{ 6 // budget|default(3) }}{{ eos_token }}{{ prefix|default('') }}{% endif %}"
)


def test_a_template_is_given_the_variables_that_a_caller_says():
    tokenizer = with_template(THINKS)
    go = [{"role": "user", "content": "Go."}]

    def text(**variables: Any) -> str:
        return tokenizer.decode(tokenizer.encode_chat(go, variables=variables)[0])

    assert text() == text(enable_thinking=True) == "Go.2<eos>"
    assert text(enable_thinking=False, budget=1, prefix="a") == "Go.<pad>6<eos>a"
    with pytest.raises(InvalidRequest, match="by zero"):
        text(budget=0)


def test_a_template_knows_the_variables_that_it_reads_and_that_are_nobody_elses():
    tokenizer = with_template(THINKS + "{{ messages }}{{ tools }}{{ chat_template }}")

    assert all(tokenizer.knows_variable(name) for name in ("enable_thinking", "budget", "prefix"))
    others = ("thinking", "messages", "tools", "chat_template", "add_generation_prompt", "eos_token", "tokenize")
    assert not [name for name in others if tokenizer.knows_variable(name)]


def test_a_model_says_why_it_calls_no_functions():
    assert tokenizer_of("json_tools").why_no_tools() is None
    assert "no place" in (with_template("{{ messages[0].content }}").why_no_tools() or "")
    shows_them = with_template("{{ messages[0].content }}{{ tools }}")
    assert "no format" in (shows_them.why_no_tools() or "")
    assert shows_them.why_no_tools(may_call=False) is None


def test_tools_are_written():
    tokenizer = tokenizer_of("json_tools")

    ids, _ = tokenizer.encode_chat(CHAT[:1], TOOLS)

    assert '"name": "count_up"' in tokenizer.decode(ids)
