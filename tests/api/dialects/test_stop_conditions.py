"""Stop conditions, and what of a stop is in the text, by the parameters of vLLM and of SGLang."""

from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import CompletionChoice

from scorepool import Client
from scorepool.local.stack import Stack

END, START = 2, 1  # <|im_end|>, <|im_start|>
PROMPT = "If the file does not exist,"
SURE = {str(END): 100}  # samples an end token at once


def complete(sdk: OpenAI, prompt: str = PROMPT, **options: Any) -> CompletionChoice:
    vllms = {"ignore_eos", "min_tokens", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"}
    added = {name: options.pop(name) for name in vllms & options.keys()} | {"return_token_ids": True}
    asked: dict[str, Any] = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 8, "logprobs": 1}
    (choice,) = sdk.completions.create(**asked | options, extra_body=added).choices
    assert options.get("echo") or len(choice.logprobs.tokens) == len(choice.token_ids)
    return choice


def test_an_ignored_end_token_is_an_ordinary_token(sdk: OpenAI):
    ignored = complete(sdk, logit_bias=SURE, ignore_eos=True)
    shown = complete(sdk, logit_bias=SURE, ignore_eos=True, skip_special_tokens=False)
    ended = complete(sdk, logit_bias=SURE)

    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([END], "stop", None)
    assert ignored.token_ids == shown.token_ids == [END] * 8
    assert (ignored.text, ignored.finish_reason) == ("", "length")
    assert (shown.text, shown.finish_reason) == ("<|im_end|>" * 8, "length")
    assert ignored.logprobs.tokens == shown.logprobs.tokens == ["<|im_end|>"] * 8
    assert (ignored.logprobs.text_offset, shown.logprobs.text_offset) == ([0] * 8, [10 * place for place in range(8)])


def test_min_tokens_delays_the_end_and_changes_no_logprob(sdk: OpenAI, native: Client):
    choice = complete(sdk, logit_bias=SURE, min_tokens=5)

    free = complete(sdk, logit_bias={str(END): -100, "0": -100}, max_tokens=5)
    assert choice.token_ids == [*free.token_ids, END]
    assert choice.logprobs.token_logprobs[:5] == free.logprobs.token_logprobs
    (scored,) = native.score("demo", [(PROMPT, free.text)]).sequences
    assert scored.token_ids == free.token_ids
    assert choice.logprobs.token_logprobs[:5] == pytest.approx(scored.logprobs.values(), abs=1e-4)


def test_min_tokens_holds_for_every_sequence_of_n_and_best_of(sdk: OpenAI):
    asked: dict[str, Any] = {"model": "demo", "prompt": ["import", PROMPT], "max_tokens": 9, "seed": 1}
    asked |= {"logit_bias": {str(END): 8}, "frequency_penalty": 0.5}
    body = {"min_tokens": 4, "return_token_ids": True}

    for options in ({"n": 3}, {"n": 1, "best_of": 3}):
        completion = sdk.completions.create(**asked, **options, extra_body=body)
        assert all(len(choice.token_ids) > 4 for choice in completion.choices)
        assert all(END not in choice.token_ids[:4] for choice in completion.choices)
        assert sdk.completions.create(**asked, **options, extra_body=body).choices == completion.choices


def test_a_stop_token_is_reported_and_is_in_the_text_if_asked_for(sdk: OpenAI):
    free = complete(sdk)
    stop = free.token_ids[3]

    cut = complete(sdk, stop_token_ids=[stop])
    whole = complete(sdk, stop_token_ids=[stop], include_stop_str_in_output=True)

    assert cut.token_ids == whole.token_ids == free.token_ids[:4]
    assert (cut.finish_reason, cut.stop_reason) == (whole.finish_reason, whole.stop_reason) == ("stop", stop)
    assert cut.text == "".join(free.logprobs.tokens[:3])
    assert whole.text == "".join(free.logprobs.tokens[:4])
    assert cut.logprobs.token_logprobs == free.logprobs.token_logprobs[:4]


def test_a_stop_string_is_reported_and_is_in_the_text_if_asked_for(sdk: OpenAI):
    text = complete(sdk, max_tokens=20).text
    stop = text[3:6]

    cut = complete(sdk, max_tokens=20, stop=["never", stop])
    whole = complete(sdk, max_tokens=20, stop=["never", stop], include_stop_str_in_output=True)

    assert (cut.text, cut.stop_reason) == (text[: text.index(stop)], stop)
    assert (whole.text, whole.stop_reason) == (text[: text.index(stop) + 3], stop)


def test_an_echoed_prompt_keeps_its_special_tokens(sdk: OpenAI):
    prompt = "<|im_start|>user\nHi<|im_end|>"

    choice = complete(sdk, prompt, echo=True, max_tokens=2, logit_bias={str(START): 100})

    assert choice.text == prompt
    assert choice.logprobs.tokens[-2:] == ["<|im_start|>"] * 2
    assert choice.logprobs.text_offset[-2:] == [len(prompt)] * 2


def test_a_chat_stops_like_a_completion(sdk: OpenAI):
    def chat(**added: Any) -> Any:
        messages = [{"role": "user", "content": "What does os.listdir do?"}]
        asked: dict[str, Any] = {"model": "demo", "messages": messages, "temperature": 0, "max_completion_tokens": 6}
        return sdk.chat.completions.create(**asked, logprobs=True, extra_body={"return_token_ids": True} | added)

    (free,) = chat().choices
    (stopped,) = chat(stop_token_ids=[free.token_ids[2]]).choices
    (whole,) = chat(stop_token_ids=[free.token_ids[2]], include_stop_str_in_output=True).choices
    (ignored,) = chat(logit_bias=SURE, ignore_eos=True).choices
    (later,) = chat(logit_bias=SURE, min_tokens=3).choices

    tokens = [entry.token for entry in free.logprobs.content]
    assert stopped.token_ids == whole.token_ids == free.token_ids[:3]
    assert (stopped.message.content, stopped.stop_reason) == ("".join(tokens[:2]), free.token_ids[2])
    assert whole.message.content == "".join(tokens[:3])
    assert (ignored.message.content, ignored.finish_reason, ignored.token_ids) == ("", "length", [END] * 6)
    assert {entry.channel for entry in ignored.logprobs.content} == {"markup"}
    assert later.token_ids == [*free.token_ids[:3], END]


def test_the_last_chunk_has_the_stop_reason(sdk: OpenAI):
    stop = complete(sdk).token_ids[3]
    asked: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 8}

    chunks = list(sdk.completions.create(**asked, stream=True, extra_body={"stop_token_ids": [stop]}))

    choices = [chunk.choices[0] for chunk in chunks]
    assert (choices[-1].finish_reason, choices[-1].stop_reason) == ("stop", stop)
    assert not any("stop_reason" in choice.model_extra for choice in choices[:-1])


def test_token_ids_outside_the_vocabulary_are_refused_by_name(sdk: OpenAI):
    with pytest.raises(openai.BadRequestError, match="below 3072") as caught:
        complete(sdk, stop_token_ids=[99_999])
    assert caught.value.param == "stop_token_ids"
    with pytest.raises(openai.BadRequestError, match="min_tokens: expected at most") as caught:
        sdk.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "Hi"}], extra_body={"min_tokens": 5000}
        )
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("params", "text", "matched"),
    [
        ({"stop_token_ids": "third"}, slice(2), "third"),
        ({"stop_token_ids": "third", "no_stop_trim": True}, slice(3), "third"),
        ({"stop_token_ids": "third", "min_new_tokens": 3, "max_new_tokens": 3}, None, None),
        ({"ignore_eos": True}, slice(6), None),
    ],
)
def test_sglangs_parameters(sdk: OpenAI, stack: Stack, params: dict[str, Any], text: slice | None, matched: str | None):
    free = complete(sdk, max_tokens=6)
    third = free.token_ids[2]
    asked = params | ({"stop_token_ids": [third]} if "stop_token_ids" in params else {})
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 6, "temperature": 0} | asked}

    answer = httpx.post(f"{stack.url}/generate", json=body, timeout=60).json()

    if text is None:
        assert third not in answer["output_ids"]
        assert len(answer["output_ids"]) == 3
    else:
        assert answer["text"] == "".join(free.logprobs.tokens[text])
        assert answer["output_ids"] == free.token_ids[: 3 if matched else 6]
    reason = answer["meta_info"]["finish_reason"]
    assert reason == ({"type": "stop", "matched": third} if matched else reason | {"type": "length"})


@pytest.mark.parametrize(
    ("params", "is_shown"),
    [
        ({}, False),
        ({"no_stop_trim": True}, False),  # a special token is not in the text
        ({"no_stop_trim": True, "skip_special_tokens": False}, True),
    ],
)
def test_sglang_reports_the_models_end_token(stack: Stack, params: dict[str, Any], is_shown: bool):
    prompt = "<|im_start|>user\nWhat does os.listdir do?<|im_end|>\n<|im_start|>assistant\n"
    body = {"text": prompt, "sampling_params": {"max_new_tokens": 400, "temperature": 0} | params}

    answer = httpx.post(f"{stack.url}/generate", json=body, timeout=60).json()

    end = answer["output_ids"][-1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    assert len(answer["output_ids"]) > 2
    assert answer["text"].endswith({0: "<|endoftext|>", END: "<|im_end|>"}[end]) is is_shown
