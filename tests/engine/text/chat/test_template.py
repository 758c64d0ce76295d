"""A chat is rendered by the model's own template: BOS, tools, calls, variables and the generation prompt."""

from typing import Any

import pytest

from scorepool.engine import ChatCodec, InvalidRequest, Tokenizer
from tests.chat_formats import TOOLS, chat_codec_of
from tests.tiny_tokenizer import BOS, EOS, build_tokenizer

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"place": "Zürich"}}}
GO = [{"role": "user", "content": "Go."}]
CHAT = [*GO, {"role": "assistant", "content": "", "tool_calls": [CALL]}]


FOR_CALLS = "{% for m in messages %}{% for c in m.tool_calls %}BODY{% endfor %}{% endfor %}"


def with_template(template: str | None) -> ChatCodec:
    fast = build_tokenizer()
    fast.chat_template = template
    return ChatCodec(Tokenizer(fast, [EOS]))


def rendered(template: str, messages: list[dict[str, Any]] = CHAT) -> str:
    chat = with_template(template)
    return chat.tokenizer.decode(chat.encode(messages)[0])


def test_the_only_bos_is_the_templates_own():
    chat = ChatCodec(Tokenizer(build_tokenizer(), [EOS]))

    ids, generation_prompt = chat.encode([{"role": "user", "content": "hi"}])

    assert ids.count(BOS) == 1
    assert chat.tokenizer.decode(generation_prompt) == "<|assistant|>\n"
    assert chat.tokenizer.decode(ids) == "<bos><|user|>\nhi\n<|assistant|>\n"


def test_a_model_without_chat_template_refuses_messages():
    with pytest.raises(InvalidRequest, match="no chat template"):
        with_template(None).encode(GO)


def test_a_template_that_raises_is_the_callers_error():
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        with_template("{{ raise_exception('roles must alternate') }}").encode(GO)


def test_arguments_are_an_object_if_the_template_reads_an_object():
    template = FOR_CALLS.replace("BODY", "{{ c.function.arguments.place }}")

    assert rendered(template) == "Zürich"


PARTS = (
    "{% for m in messages %}{{ m.role }}{% if m.content[0].type == 'image' %}:{% else %}: {% endif %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %};{% endfor %}"
)


def test_a_template_that_shows_only_parts_gets_every_text_as_one():
    chat = [{"role": "system", "content": "Be brief."}, *CHAT, {"role": "user", "content": GO[0]["content"]}]

    assert rendered(PARTS, chat) == "system: Be brief.;user: Go.;assistant: ;user: Go.;"
    assert with_template(PARTS).template.shows_parts_only
    assert not with_template("{% for m in messages %}{{ m.content }}{% endfor %}").template.shows_parts_only
    assert not with_template("{{ bos_token }}").template.shows_parts_only


def test_arguments_are_json_if_the_template_appends_them_to_a_string():
    template = FOR_CALLS.replace("BODY", "{{ 'f' + c.function.arguments }}")

    assert rendered(template) == 'f{"place": "Zürich"}'


def test_a_template_that_cannot_render_a_message_is_the_callers_error():
    with pytest.raises(InvalidRequest, match="cannot render"):
        rendered("{{ messages[0].content + 1 }}")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].content }}{% if add_generation_prompt %}<|a|><think>\n{% endif %}", "<|a|><think>\n"),
        ("{{ messages[0].content }}<|end|>{% if not add_generation_prompt %}<|eot|>{% endif %}", ""),
        ("{{ messages[0].content }}{% if add_generation_prompt %}<pad>a{% else %}<eos>{% endif %}", "<pad>a"),
    ],
)
def test_the_generation_prompt_is_the_text_that_add_generation_prompt_adds(template: str, expected: str):
    chat = with_template(template)

    ids, generation_prompt = chat.encode([{"role": "user", "content": "<think>"}])

    decode = chat.tokenizer.decode
    assert decode(generation_prompt).endswith(expected)
    assert decode(ids).endswith(expected)
    assert len(decode(generation_prompt)) <= len(expected) + 2  # its first token may begin in the text before it


THINKS = (
    "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}<pad>{% endif %}"
    "{% if add_generation_prompt %}{{ 6 // budget|default(3) }}{{ eos_token }}{{ prefix|default('') }}{% endif %}"
)


def test_a_template_gets_the_callers_variables():
    chat = with_template(THINKS)

    def text(**variables: Any) -> str:
        return chat.tokenizer.decode(chat.encode(GO, variables=variables)[0])

    assert text() == text(enable_thinking=True) == "Go.2<eos>"
    assert text(enable_thinking=False, budget=1, prefix="a") == "Go.<pad>6<eos>a"
    with pytest.raises(InvalidRequest, match="by zero"):
        text(budget=0)


def test_a_template_accepts_the_variables_that_it_reads_and_no_other_party_sets():
    template = with_template(THINKS + "{{ messages }}{{ tools }}{{ chat_template }}").template

    assert all(template.accepts_variable(name) for name in ("enable_thinking", "budget", "prefix"))
    others = ("thinking", "messages", "tools", "chat_template", "add_generation_prompt", "eos_token", "tokenize")
    assert not [name for name in others if template.accepts_variable(name)]


def test_a_template_accepts_no_name_that_is_not_a_variable_of_it():
    """Names in texts, of attributes, of loops, of macros and of what the template sets itself have no effect."""
    template = with_template(
        "{# comment #}text {% set own = messages[0].role %}{% macro show(part) %}{{ part.field }}{% endmacro %}"
        "{% for turn in messages %}{% if not late %}{% continue %}{% endif %}"
        "{% generation %}{{ show(turn) + own + turn['key'] }}{% endgeneration %}{% endfor %}"
        "{% if not date is defined %}{% set date = strftime_now('%d') %}{% endif %}{{ date }}"
        "{% if never %}{{ raise_exception('no') }}{% endif %}{{ range(2) }}{{ namespace(a=1).a }}"
    ).template

    assert [name for name in ("late", "date", "never") if template.accepts_variable(name)] == ["late", "date", "never"]
    others = ["comment", "text", "own", "show", "part", "field", "turn", "key", "role", "strftime_now", "range", "a"]
    assert not [name for name in others if template.accepts_variable(name)]


def test_the_reason_why_a_model_cannot_use_tools():
    assert chat_codec_of("json_tools").tools_unsupported_reason() is None
    assert "does not render" in (with_template("{{ messages[0].content }}").tools_unsupported_reason() or "")
    renders_tools = with_template("{{ messages[0].content }}{{ tools }}")
    assert "format" in (renders_tools.tools_unsupported_reason() or "")
    assert renders_tools.tools_unsupported_reason(may_call=False) is None


def test_tools_are_rendered():
    chat = chat_codec_of("json_tools")

    ids, _ = chat.encode(GO, TOOLS)

    assert '"name": "count_up"' in chat.tokenizer.decode(ids)
