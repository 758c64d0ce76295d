"""`/v1/completions` as OpenAI's own SDK sees it."""

from itertools import pairwise

import openai
import pytest
from openai import OpenAI
from openai.types import Completion, CompletionChoice
from redis import Redis

from scorepool import Client, wire
from scorepool.local.stack import Stack

PROMPT = "If the file does not exist,"
EMOJI = "x = '🙂 é'"  # more tokens than characters


def complete(sdk: OpenAI, prompt: object = PROMPT, **options: object) -> Completion:
    return sdk.completions.create(**{"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 8} | options)


def only(completion: Completion) -> CompletionChoice:
    (choice,) = completion.choices
    return choice


def check_arrays(choice: CompletionChoice) -> None:
    """Check that the arrays have equal lengths and match the text."""
    logprobs = choice.logprobs
    assert logprobs is not None
    tokens, offsets = logprobs.tokens, logprobs.text_offset
    assert len(tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(offsets)
    assert all(before <= after for before, after in pairwise(offsets))
    for token, logprob, top in zip(tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        if logprob is not None:
            assert top[token] == logprob  # the same float, to the bit
            assert max(top.values()) <= 0
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice.text[offset:].startswith(token)


def test_one_completion(sdk: OpenAI, native: Client):
    completion = complete(sdk, logprobs=3)

    choice = only(completion)
    assert (completion.object, completion.model, choice.index) == ("text_completion", "demo", 0)
    assert completion.id.startswith("cmpl-")
    assert completion.system_fingerprint.startswith("fp_")
    check_arrays(choice)
    assert all(len(top) in (3, 4) for top in choice.logprobs.top_logprobs)
    expected = native.generate("demo", PROMPT, max_tokens=8, temperature=0.0).sequences[0]
    assert choice.text == expected.text
    assert choice.logprobs.token_logprobs == expected.logprobs.values()
    assert choice.finish_reason == expected.finish_reason
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.num_prompt_tokens, len(expected.token_ids))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_every_form_of_a_prompt_is_answered_in_order(sdk: OpenAI, native: Client):
    texts = ["import", PROMPT, "return the"]
    ids = [native.generate("demo", text, max_tokens=1).sequences[0].prompt_token_ids for text in texts]

    by_text, by_ids = complete(sdk, texts), complete(sdk, ids)

    alone = [only(complete(sdk, text)).text for text in texts]
    assert [choice.text for choice in by_text.choices] == alone == [choice.text for choice in by_ids.choices]
    assert [choice.index for choice in by_text.choices] == [0, 1, 2]
    assert only(complete(sdk, ids[1])).text == alone[1]
    assert by_ids.usage == by_text.usage


@pytest.mark.parametrize("prompt", [PROMPT, EMOJI, [1209, 274, 312], [5]])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echo_reports_the_prompt_and_then_the_generated_tokens(sdk: OpenAI, prompt: object, max_tokens: int):
    completion = complete(sdk, prompt, echo=True, logprobs=1, max_tokens=max_tokens)

    choice = only(completion)
    check_arrays(choice)
    assert len(choice.logprobs.tokens) == completion.usage.prompt_tokens + completion.usage.completion_tokens
    assert completion.usage.completion_tokens <= max_tokens
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    assert None not in choice.logprobs.token_logprobs[1:]
    if isinstance(prompt, str):
        assert choice.text.startswith(prompt)
    if max_tokens == 0:
        assert choice.finish_reason == "length"
        assert not isinstance(prompt, str) or choice.text == prompt


def test_echo_gives_the_scores_of_a_score_job(sdk: OpenAI, native: Client):
    ids = [1209, 274, 312, 885, 305]

    choice = only(complete(sdk, ids, echo=True, logprobs=0, max_tokens=1))

    scored = native.score("demo", [(ids[:1], ids[1:])]).sequences[0]
    assert choice.logprobs.token_logprobs[1:5] == pytest.approx(scored.logprobs.values(), abs=1e-5)


def test_a_sampled_end_token_has_an_entry(sdk: OpenAI):
    ends = 2  # <|im_end|>

    choice = only(complete(sdk, [1209], echo=True, logprobs=1, max_tokens=1, logit_bias={str(ends): 100}))

    check_arrays(choice)
    assert choice.logprobs.tokens[-1] == "<|im_end|>"
    assert len(choice.logprobs.tokens) == 2
    assert choice.finish_reason == "stop"
    assert choice.text == "import"


def test_n_and_best_of(sdk: OpenAI):
    completion = complete(sdk, [PROMPT, "import"], n=2, temperature=1, seed=-5, max_tokens=6)
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    assert completion.choices[0].text != completion.choices[1].text
    again = complete(sdk, [PROMPT, "import"], n=2, temperature=1, seed=-5, max_tokens=6)
    assert [choice.text for choice in again.choices] == [choice.text for choice in completion.choices]

    options = {"temperature": 1, "seed": 3, "max_tokens": 6, "logprobs": 0}
    several = complete(sdk, n=4, **options).choices
    best = complete(sdk, n=1, best_of=4, **options)

    def mean(choice: CompletionChoice) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    assert only(best).text == max(several, key=mean).text
    assert best.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in several)


@pytest.mark.parametrize("many", [False, True])
def test_a_stop_string_ends_the_text(sdk: OpenAI, many: bool):
    text = only(complete(sdk, max_tokens=20)).text
    stop = text[3:6]

    choice = only(complete(sdk, max_tokens=20, stop=["\x00", "\x01", "\x02", "\x03", stop] if many else stop))

    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"


def test_biases_and_penalties(sdk: OpenAI):
    plain = only(complete(sdk, logprobs=0, extra_body={"return_token_ids": True}))
    banned = {str(token_id): -100 for token_id in set(plain.token_ids)}
    moved = only(complete(sdk, logit_bias=banned, extra_body={"return_token_ids": True}))
    assert not set(map(str, moved.token_ids)) & set(banned)

    for penalty in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"extra_body": {"repetition_penalty": 9}}):
        assert only(complete(sdk, "import", max_tokens=12, **penalty)).text != "import" * 12
    assert only(complete(sdk, "import", max_tokens=12)).text == "import" * 12


def test_vllms_additions(sdk: OpenAI):
    extra = {"prompt_logprobs": 30, "return_token_ids": True, "return_tokens_as_token_ids": True, "top_k": -1}

    choice = only(complete(sdk, [1209, 274, 312], logprobs=2, max_tokens=3, extra_body=extra))

    assert choice.prompt_token_ids == [1209, 274, 312]
    assert [f"token_id:{token_id}" for token_id in choice.token_ids] == choice.logprobs.tokens
    assert all(len(top) in (2, 3) for top in choice.logprobs.top_logprobs)
    assert choice.text  # without the prompt: no echo
    assert choice.prompt_logprobs[0] is None
    for token_id, entries in zip([274, 312], choice.prompt_logprobs[1:], strict=True):
        assert len(entries) in (30, 31)
        assert next(iter(entries)) == str(token_id)  # as in vLLM: inspect-ai's perplexity() reads the first entry
        ranked = sorted(entries.values(), key=lambda entry: entry["rank"])
        assert [entry["logprob"] for entry in ranked] == sorted((e["logprob"] for e in ranked), reverse=True)
        assert (
            entries[str(token_id)]["logprob"]
            == ranked[[e["rank"] for e in ranked].index(entries[str(token_id)]["rank"])]["logprob"]
        )


@pytest.mark.parametrize(
    ("options", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"suffix": "x"}, openai.BadRequestError, "suffix"),
        ({"extra_body": {"min_tokens": 9}}, openai.BadRequestError, "min_tokens"),
        ({"extra_body": {"stop": 5}}, openai.BadRequestError, "stop"),
        ({"logprobs": 21}, openai.BadRequestError, "logprobs"),
        ({"logprobs": True}, openai.BadRequestError, "logprobs"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"n": 3, "best_of": 2}, openai.BadRequestError, "best_of"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 4000}, openai.BadRequestError, "prompt"),
        ({"prompt": [1209], "max_tokens": 2048}, openai.BadRequestError, "max_tokens"),
        ({"prompt": []}, openai.BadRequestError, "prompt"),
        ({"prompt": ["a", 1]}, openai.BadRequestError, "prompt"),
        ({"prompt": [[1], []]}, openai.BadRequestError, "prompt[1]"),
        ({"prompt": [[1], [99999]]}, openai.BadRequestError, "prompt[1][0]"),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "logit_bias"),
    ],
)
def test_unsupported_and_wrong_values_are_refused_by_name(
    sdk: OpenAI, options: dict[str, object], error: type[openai.APIStatusError], param: str | None
):
    with pytest.raises(error) as caught:
        complete(sdk, **options)

    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.code
    assert caught.value.body["message"]


def test_a_model_answers_to_all_its_names(sdk: OpenAI, native: Client):
    by_alias = complete(sdk, model="gpt-4o-mini")

    assert by_alias.model == "gpt-4o-mini"
    assert only(by_alias).text == only(complete(sdk)).text
    assert by_alias.system_fingerprint == complete(sdk).system_fingerprint
    assert native.generate("gpt-4o-mini", PROMPT, max_tokens=1).stamp.model == "demo"
    assert {model.id: model.root for model in sdk.models.list()} == {"demo": "demo", "gpt-4o-mini": "demo"}
    assert sdk.models.retrieve("gpt-4o-mini").max_model_len == 2048
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("gpt-4o")


def test_a_job_for_an_alias_that_is_older_than_its_worker_runs(stack: Stack, native: Client):
    """The job is in the alias's own queue: no worker had registered the alias yet."""
    with Redis.from_url(stack.redis_url) as redis:
        job_id = native.submit(wire.Generate(model="later", prompt="a", max_tokens=1, wait_for_model=True)).id
        redis.lrem("rq:queue:later", 1, job_id)
        redis.hset(f"rq:job:{job_id}", "origin", "gpt-4o-mini")
        redis.rpush("rq:queue:gpt-4o-mini", job_id)

    assert native.result(job_id, timeout_s=60).usage.completion_tokens == 1


@pytest.mark.parametrize("prompt", [PROMPT, EMOJI, [1209, 274, 312], [5]])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_without_logprobs_has_the_same_text(sdk: OpenAI, prompt: object, max_tokens: int):
    bare = only(complete(sdk, prompt, echo=True, max_tokens=max_tokens))
    full = only(complete(sdk, prompt, echo=True, max_tokens=max_tokens, logprobs=1))

    assert (bare.text, bare.finish_reason, bare.logprobs) == (full.text, full.finish_reason, None)
