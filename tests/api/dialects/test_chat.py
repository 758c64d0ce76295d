"""`/v1/chat/completions` as OpenAI's own SDK sees it."""

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice

from scorepool import Client, wire
from scorepool.local.stack import Stack

MESSAGES = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What does os.listdir do?"}]


def chat(sdk: OpenAI, messages: object = MESSAGES, **options: object) -> ChatCompletion:
    return sdk.chat.completions.create(**{"model": "demo", "messages": messages, "temperature": 0} | options)


def only(completion: ChatCompletion) -> Choice:
    (choice,) = completion.choices
    return choice


def joined(choice: Choice) -> bytes:
    return b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)


def test_one_answer(sdk: OpenAI, native: Client):
    completion = chat(sdk, logprobs=True, top_logprobs=3, max_completion_tokens=12)

    choice = only(completion)
    assert (completion.object, completion.model) == ("chat.completion", "demo")
    assert choice.message.role == "assistant"
    asked = [native_message(message) for message in MESSAGES]
    expected = native.generate("demo", None, messages=asked, max_tokens=12, temperature=0.0, top_logprobs=3)
    scored = expected.sequences[0]
    assert choice.message.content == scored.text
    assert [entry.logprob for entry in choice.logprobs.content] == scored.logprobs.values()
    assert len(choice.logprobs.content) == completion.usage.completion_tokens
    assert joined(choice) == choice.message.content.encode()
    for entry, ids in zip(choice.logprobs.content, scored.top_ids, strict=True):
        values = [top.logprob for top in entry.top_logprobs]
        assert len(ids) == len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0]  # greedy


def native_message(message: dict[str, str]) -> object:
    return wire.Message(**message)


def test_the_end_token_has_an_entry_and_no_text(sdk: OpenAI):
    completion = chat(sdk, logprobs=True, logit_bias={"2": 100})

    choice = only(completion)
    assert (choice.message.content, choice.finish_reason) == ("", "stop")
    (entry,) = choice.logprobs.content
    assert (entry.token, entry.bytes) == ("<|im_end|>", [])
    assert completion.usage.completion_tokens == 1


def test_entries_join_to_the_content_if_a_stop_string_cuts_a_token(sdk: OpenAI):
    whole = only(chat(sdk, max_tokens=20)).message.content
    stop = whole[5:8]

    choice = only(chat(sdk, max_tokens=20, stop=stop, logprobs=True))

    assert choice.message.content == whole[: whole.index(stop)]
    assert joined(choice) == choice.message.content.encode()


def test_without_logprobs_there_are_none(sdk: OpenAI):
    assert only(chat(sdk, max_tokens=2)).logprobs is None


def test_an_answer_without_max_tokens_ends_at_the_context(sdk: OpenAI):
    messages = [{"role": "user", "content": "import os\n" * 450}]
    completion = chat(sdk, messages, logit_bias={"2": -100, "0": -100})

    assert only(completion).finish_reason == "length"
    assert completion.usage.completion_tokens > 100  # more than a default such as 16
    assert completion.usage.total_tokens == 2048


def test_roles_parts_and_tools_reach_the_template(sdk: OpenAI):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Ans"}, {"type": "text", "text": "wer."}]},
        {"role": "user", "content": "What does os.listdir do?"},
    ]
    ids = {"extra_body": {"return_token_ids": True}, "max_tokens": 1}
    assert chat(sdk, messages, **ids).prompt_token_ids == chat(sdk, **ids).prompt_token_ids

    tools = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    tools += [{"role": "tool", "tool_call_id": "c1", "content": "a list"}]
    shown = chat(sdk, tools, **ids).prompt_token_ids
    assert len(shown) > len(chat(sdk, **ids).prompt_token_ids)
    call["function"] = {"name": "f", "arguments": {"x": 1}}  # an object, as templates expect it
    assert chat(sdk, tools, **ids).prompt_token_ids == shown


def test_a_chat_has_as_many_tokens_as_tokenize_says(sdk: OpenAI, stack: Stack):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "it?"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]}]

    reply = httpx.post(f"{stack.url}/tokenize", json={"messages": messages, "add_generation_prompt": True}).json()

    asked = chat(sdk, messages, max_tokens=1, extra_body={"return_token_ids": True})
    assert reply["tokens"] == asked.prompt_token_ids
    assert reply["count"] == asked.usage.prompt_tokens


def test_choices_of_one_chat_differ(sdk: OpenAI):
    first = chat(sdk, n=3, temperature=1, seed=4, max_tokens=8)
    again = chat(sdk, n=3, temperature=1, seed=4, max_tokens=8)

    contents = [choice.message.content for choice in first.choices]
    assert len(set(contents)) == 3
    assert contents == [choice.message.content for choice in again.choices]


@pytest.mark.parametrize(
    ("options", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user"}]}, openai.BadRequestError, "messages[0]"),
        ({"messages": [{"role": "king", "content": "a"}]}, openai.BadRequestError, "messages[0].role"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools"),
        ({"response_format": {"type": "grammar"}}, openai.BadRequestError, "response_format.type"),
        ({"reasoning_effort": "low"}, openai.BadRequestError, "reasoning_effort"),
        ({"top_logprobs": 3}, openai.BadRequestError, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, openai.BadRequestError, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 5000}, openai.BadRequestError, "messages"),
    ],
)
def test_unsupported_and_wrong_values_are_refused_by_name(
    sdk: OpenAI, options: dict[str, object], error: type[openai.APIStatusError], param: str | None
):
    with pytest.raises(error) as caught:
        chat(sdk, **options)

    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def reported(choice: Choice) -> tuple[list[str], list[float]]:
    """Return the tokens whose logprobs a choice reports, and the logprobs."""
    entries = choice.logprobs.content or [] if choice.logprobs is not None else []
    found = [(one.token, one.logprob) for entry in entries for one in (entry, *entry.top_logprobs)]
    return [token for token, _ in found], [logprob for _, logprob in found]


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize(
    "options", [{}, {"logprobs": True, "top_logprobs": 5}, {"n": 2, "seed": 1, "temperature": 0.9}]
)
def test_the_logprobs_of_a_chats_prompt(sdk: OpenAI, native: Client, k: int, options: dict[str, object]):
    extra = {"prompt_logprobs": k, "return_token_ids": True}
    with_prompt = chat(sdk, max_completion_tokens=6, extra_body=extra, **options)
    without = chat(sdk, max_completion_tokens=6, extra_body={"return_token_ids": True}, **options)

    assert [choice.message for choice in with_prompt.choices] == [choice.message for choice in without.choices]
    for choice, other in zip(with_prompt.choices, without.choices, strict=True):
        tokens, logprobs = reported(choice)
        other_tokens, other_logprobs = reported(other)
        assert tokens == other_tokens
        assert logprobs == pytest.approx(other_logprobs, abs=1e-5)  # MLX computes them beside ranks, else NumPy
    assert [choice.token_ids for choice in with_prompt.choices] == [choice.token_ids for choice in without.choices]
    token_ids = with_prompt.prompt_token_ids
    assert token_ids == native.tokenize("demo", messages=[wire.Message(**message) for message in MESSAGES]).token_ids
    [scored] = native.score("demo", [(token_ids[:1], token_ids[1:])], top_logprobs=k, rank=True).sequences
    first, *entries = with_prompt.prompt_logprobs
    assert first is None
    for place, (entry, token_id) in enumerate(zip(entries, token_ids[1:], strict=True)):
        own = entry[str(token_id)]
        assert next(iter(entry)) == str(token_id)
        assert own["logprob"] == pytest.approx(scored.logprobs[place], abs=1e-4)
        assert own["rank"] == scored.ranks[place]
        if k:
            assert set(map(int, entry)) == {token_id, *scored.top_ids[place]}
    assert with_prompt.logprobs_mode == "raw_logprobs"
    assert "prompt_logprobs" not in without.model_dump()
