"""text-generation-inference's routes as Hugging Face's own client sees them, compared with native jobs."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError
from huggingface_hub.inference._generated.types import TextGenerationInputGrammarType

from scorepool import Client
from scorepool.local.stack import Stack

PROMPT = "Return the list of all files"
CHOICES = [" in a folder.", " or raise an error.", "\n"]


@pytest.fixture
def hub(stack: Stack) -> Iterator[InferenceClient]:
    with InferenceClient(model=stack.url, token="unused", timeout=60) as client:
        yield client


@pytest.fixture
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        yield http


def test_the_text_is_that_of_a_greedy_job(hub: InferenceClient, native: Client):
    [sequence] = native.generate("demo", PROMPT, temperature=0.0, max_tokens=8, skip_special_tokens=True).sequences

    assert hub.text_generation(PROMPT, max_new_tokens=8) == sequence.text
    assert hub.text_generation(PROMPT, max_new_tokens=8, return_full_text=True) == PROMPT + sequence.text
    assert "".join(hub.text_generation(PROMPT, max_new_tokens=8, stream=True)) == sequence.text


def test_details_have_the_logprobs_of_prompt_and_answer(hub: InferenceClient, native: Client):
    output = hub.text_generation(
        PROMPT, max_new_tokens=6, details=True, decoder_input_details=True, top_n_tokens=3, seed=5, temperature=0.7
    )

    [sequence] = native.generate(
        "demo",
        PROMPT,
        temperature=0.7,
        seed=5,
        max_tokens=6,
        prompt_logprobs=True,
        top_logprobs=3,
        skip_special_tokens=True,
    ).sequences
    split, details = sequence.num_reported_prompt_tokens, output.details
    assert details is not None
    assert PROMPT + output.generated_text == sequence.text
    assert [token.id for token in [*details.prefill, *details.tokens]] == sequence.token_ids
    assert details.prefill[0].logprob is None
    logprobs = [token.logprob for token in [*details.prefill, *details.tokens]]
    assert logprobs[1:] == pytest.approx(sequence.logprobs.values()[1:], abs=1e-5)
    assert details.finish_reason == ("length" if sequence.finish_reason == "length" else "eos_token")
    assert (details.generated_tokens, details.seed) == (len(sequence.token_ids) - split, 5)
    assert [token.special for token in details.tokens] == [
        place in sequence.skipped for place in range(len(details.tokens))
    ]
    assert details.top_tokens is not None
    for top, ids, values in zip(
        details.top_tokens, sequence.top_ids[split:], sequence.top_logprobs[split:], strict=True
    ):
        assert [token["id"] for token in top] == ids
        assert [token["logprob"] for token in top] == pytest.approx(values.values(), abs=1e-5)


def test_a_stream_has_each_token_once_and_ends_with_the_text(hub: InferenceClient):
    options: dict[str, Any] = {"max_new_tokens": 12, "details": True, "temperature": 0.9, "seed": 2, "top_n_tokens": 2}
    whole = hub.text_generation(PROMPT, **options)

    events = list(hub.text_generation(PROMPT, **options, stream=True))

    assert whole.details is not None
    assert [event.token.id for event in events] == [token.id for token in whole.details.tokens]
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    assert [event.token.logprob for event in events] == [token.logprob for token in whole.details.tokens]
    assert [event.top_tokens for event in events] == whole.details.top_tokens
    assert "".join(event.token.text for event in events if not event.token.special) == whole.generated_text
    *before, last = events
    assert all(event.generated_text is None and event.details is None for event in before)
    assert last.generated_text == whole.generated_text
    assert last.details is not None
    assert (last.details.finish_reason, last.details.generated_tokens) == ("length", 12)
    assert last.details.input_length > 0


def test_loglikelihoods_over_the_api_are_those_of_a_score_job(hub: InferenceClient, native: Client, http: httpx.Client):
    """lighteval adds up the prefill logprobs behind the context's tokens, and asks for one token more."""
    num_context = http.post("/tokenize", json={"model": "demo", "prompt": PROMPT}).json()["count"]
    for choice in CHOICES:
        output = hub.text_generation(PROMPT + choice, max_new_tokens=1, details=True, decoder_input_details=True)

        [scored] = native.score("demo", [(PROMPT, choice)]).sequences
        assert output.details is not None
        found = [token.logprob for token in output.details.prefill[num_context:]]
        assert found == pytest.approx(scored.logprobs.values(), abs=1e-5)
        assert sum(found) == pytest.approx(scored.logprob_sum, abs=1e-4)


def test_the_end_and_the_form_of_a_text_are_reported(hub: InferenceClient):
    plain = hub.text_generation(PROMPT, max_new_tokens=20)
    stop = plain[4:6]
    stopped = hub.text_generation(PROMPT, max_new_tokens=20, stop=[stop], details=True)
    grammar = TextGenerationInputGrammarType(type="regex", value="[A-C]{2}-\\d")  # type: ignore[arg-type]
    formed = hub.text_generation(PROMPT, max_new_tokens=20, grammar=grammar, details=True, do_sample=True, seed=1)
    cut = hub.text_generation(PROMPT, max_new_tokens=1, truncate=3, details=True, decoder_input_details=True)

    assert stopped.generated_text == plain[: plain.index(stop) + len(stop)]
    assert stopped.details is not None
    assert stopped.details.finish_reason == "stop_sequence"
    assert formed.details is not None
    assert formed.details.finish_reason == "eos_token"
    assert formed.generated_text[2] == "-"
    assert len(formed.generated_text) == 4
    assert cut.details is not None
    assert len(cut.details.prefill) == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"best_of": 2}, "parameters.best_of: `best_of` is not supported here, expected 1"),
        ({"watermark": True}, "`watermark` is not supported here, expected false"),
        ({"typical_p": 0.5}, "`typical_p` is not supported here"),
        ({"temperature": 0.0}, "parameters.temperature: "),
        ({"max_new_tokens": 999_999}, "parameters.max_new_tokens"),
        ({"max_new_tokens": 9_999}, "may generate 9999 more; this model's context is 2048 tokens"),
        ({"grammar": {"type": "regex", "value": "a("}}, "parameters.grammar: character 2: unclosed group"),
        ({"adapter_id": "nobody"}, "parameters.adapter_id"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_here_is_refused_by_name(hub: InferenceClient, options: dict[str, Any], says: str, stream: bool):
    with pytest.raises(ValidationError) as caught:
        list(hub.text_generation(PROMPT, **options, stream=stream))

    assert says in str(caught.value)


def test_a_prompt_cannot_be_reported_in_a_stream(http: httpx.Client):
    parameters = {"details": True, "decoder_input_details": True}
    reply = http.post("/generate_stream", json={"inputs": PROMPT, "parameters": parameters})

    assert reply.status_code == 400
    assert reply.json()["error"].startswith("parameters.decoder_input_details: it cannot be streamed")
    assert reply.json()["error_type"] == "validation"


def test_one_path_takes_the_bodies_of_both_servers(http: httpx.Client):
    ours = http.post("/generate", json={"inputs": PROMPT, "parameters": {"max_new_tokens": 4}})
    sglangs = http.post("/generate", json={"text": PROMPT, "sampling_params": {"max_new_tokens": 4, "temperature": 0}})
    listed = http.post("/", json={"inputs": PROMPT, "parameters": {"max_new_tokens": 4}})

    assert ours.json() == {"generated_text": sglangs.json()["text"]}
    assert listed.json() == [ours.json()]
    assert http.post("/generate", json={"inputs": PROMPT, "text": PROMPT}).json()["error_type"] == "validation"
    assert http.post("/generate", json={"prompt": PROMPT}).json()["error"]["code"] == "invalid"


def test_the_server_describes_its_model(http: httpx.Client):
    info = http.get("/info").json()
    [model] = http.get("/v1/models").json()["data"][:1]

    assert (info["model_id"], info["model_pipeline_tag"]) == (model["id"], "text-generation")
    assert info["max_total_tokens"] == model["max_model_len"] == info["max_input_tokens"] + 1
    assert info["model_sha"]
