"""A worker that speculates gives the answers of one that does not, and counts the tokens that it proposed."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import UNSET

from scorepool import Client, wire
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests.engine import mtp_checkpoints

PROMPT = [1209, 274, 312, 885]
REPEATING = {"model": "demo", "max_tokens": 64, "logit_bias": {"885": 60, "274": 58}, "ignore_eos": True}


@pytest.fixture(scope="module")
def speculating(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("stack")
    environ = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_SPECULATION": "ngram",
        "SCOREPOOL_RESULT_CACHE_BYTES": "0",
    }
    with Stack([f"demo={demo_folder}"], state=state, environ=environ, logs=state / "logs") as stack:
        yield stack


@pytest.fixture(scope="module")
def drafting(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Serve the demo model with itself as its draft: every proposal is accepted."""
    state = tmp_path_factory.mktemp("stack")
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_DRAFTS": f"demo={demo_folder}"}
    with Stack([f"demo={demo_folder}"], state=state, environ=environ, logs=state / "logs") as stack:
        yield stack


@pytest.fixture(scope="module")
def heading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Serve a model whose checkpoint has a head for multi-token prediction that agrees with it."""
    folder, state = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("stack")
    mtp_checkpoints.build("mimo", folder, agrees=True)
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_SPECULATION": "mtp"}
    with Stack([f"tiny={folder}"], state=state, environ=environ, logs=state / "logs") as stack:
        yield stack


def complete(stack: Stack, **options: Any) -> dict[str, Any]:
    reply = httpx.post(f"{stack.url}/v1/completions", json={**REPEATING, "prompt": PROMPT, **options}, timeout=60)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 4, "n": 2}])
def test_completions_are_those_of_plain_generation(stack: Stack, speculating: Stack, options: dict[str, Any]):
    plain, verified = (complete(one, logprobs=2, return_token_ids=True, **options) for one in (stack, speculating))
    until = time.monotonic() + 200
    while accepted_tokens(verified) <= 20:  # on a busy machine steps may cost too much to speculate
        assert time.monotonic() < until
        verified = complete(speculating, logprobs=2, return_token_ids=True, **options)

    for one, other in zip(plain["choices"], verified["choices"], strict=True):
        assert (other["token_ids"], other["text"]) == (one["token_ids"], one["text"])
        for name in ("tokens", "text_offset"):
            assert other["logprobs"][name] == one["logprobs"][name]
        assert other["logprobs"]["token_logprobs"] == pytest.approx(one["logprobs"]["token_logprobs"], abs=1e-4)
        for right, found in zip(one["logprobs"]["top_logprobs"], other["logprobs"]["top_logprobs"], strict=True):
            assert found == pytest.approx(right, abs=1e-4)
    details = verified["usage"].pop("completion_tokens_details")
    assert verified["usage"] == plain["usage"]
    assert details["accepted_prediction_tokens"] > 20
    assert details["rejected_prediction_tokens"] >= 0


def accepted_tokens(reply: dict[str, Any]) -> int:
    accepted: int = reply["usage"].get("completion_tokens_details", {}).get("accepted_prediction_tokens", 0)
    return accepted


def test_a_streams_usage_counts_the_proposed_tokens(speculating: Stack):
    options = {
        **REPEATING,
        "prompt": PROMPT,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    until = time.monotonic() + 200
    chunks = stream(speculating, options)
    while accepted_tokens(chunks[-1]) <= 20:
        assert time.monotonic() < until
        chunks = stream(speculating, options)

    assert (
        "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
        == complete(speculating, temperature=0)["choices"][0]["text"]
    )
    assert chunks[-1]["usage"]["completion_tokens"] == 64


def stream(stack: Stack, body: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
    """Return the chunks of a stream."""
    reply = httpx.post(stack.url + path, json=body | {"stream": True}, timeout=60)
    return [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: {")]


def test_jobs_and_metrics_count_the_proposed_tokens(stack: Stack, speculating: Stack):
    with Client(speculating.url) as client, Client(stack.url) as plain:
        bias = {885: 60.0, 274: 58.0}
        options = {"max_tokens": 64, "temperature": 0.0, "logit_bias": bias, "ignore_eos": True}
        verified, right = (one.generate("demo", PROMPT, **options) for one in (client, plain))
        until = time.monotonic() + 200
        while verified.usage.accepted_tokens <= 20:
            assert time.monotonic() < until
            verified = client.generate("demo", PROMPT, **options)

    assert verified.sequences[0].token_ids == right.sequences[0].token_ids
    assert 20 < verified.usage.accepted_tokens <= verified.usage.proposed_tokens
    assert (right.usage.accepted_tokens, right.usage.proposed_tokens) == (0, 0)
    until = time.monotonic() + 200
    while "scorepool_engine_acceptance_ratio{" not in httpx.get(f"{speculating.url}/metrics").text:
        assert time.monotonic() < until
        complete(speculating, temperature=0)  # the ratio is that of the last seconds


def is_entry(entry: dict[str, Any], token_ids: list[int]) -> bool:
    same = token_ids[entry["position"] : entry["position"] + 1] == [entry["token_id"]]
    return entry.keys() == {"position", "token_id", "draft_logprob", "logprob", "accepted"} and (
        same or not entry["accepted"]
    )


def test_proposed_tokens_are_reported_with_the_logprobs_of_n_grams_as_null(speculating: Stack):
    options = {"logprobs": 0, "temperature": 0, "return_token_ids": True, "include_draft_logprobs": True}
    [choice] = complete(speculating, **options)["choices"]
    until = time.monotonic() + 200
    while sum(entry["accepted"] for entry in choice["draft_logprobs"]) <= 20:
        assert time.monotonic() < until
        [choice] = complete(speculating, **options)["choices"]
    for entry in choice["draft_logprobs"]:
        assert is_entry(entry, choice["token_ids"])
        assert entry["draft_logprob"] is None
        if entry["accepted"]:
            assert entry["logprob"] == pytest.approx(choice["logprobs"]["token_logprobs"][entry["position"]], abs=1e-4)


def test_a_draft_model_that_agrees_has_the_models_own_logprobs(stack: Stack, drafting: Stack):
    options = {"model": "demo", "max_tokens": 40, "logprobs": True, "seed": 3, "return_token_ids": True}
    body = options | {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True}
    url = "/v1/chat/completions"
    plain = httpx.post(stack.url + url, json=body, timeout=60).json()["choices"][0]

    body["include_draft_logprobs"] = True
    choice: dict[str, Any] = {"draft_logprobs": []}
    until = time.monotonic() + 200
    while len(choice["draft_logprobs"]) <= 5:
        assert time.monotonic() < until
        reply = httpx.post(drafting.url + url, json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        [choice] = reply.json()["choices"]
    chunks = stream(drafting, body, url)

    assert choice["token_ids"] == plain["token_ids"]
    assert choice["logprobs"]["content"] == [
        entry | {"logprob": pytest.approx(entry["logprob"], abs=1e-4)} for entry in plain["logprobs"]["content"]
    ]
    for entry in choice["draft_logprobs"]:
        assert is_entry(entry, choice["token_ids"])
        assert entry["draft_logprob"] == pytest.approx(entry["logprob"], abs=1e-3)
    with_entries = [one for chunk in chunks for one in chunk["choices"] if "draft_logprobs" in one]
    assert [one["finish_reason"] for one in with_entries] == ["length"]
    assert all(is_entry(entry, choice["token_ids"]) for entry in with_entries[0]["draft_logprobs"])


def test_jobs_report_proposed_tokens(drafting: Stack):
    with Client(drafting.url) as client:
        for _ in range(2):  # the second is computed again: what was proposed is in no cache
            result = client.generate("demo", PROMPT, max_tokens=40, temperature=0, include_draft_logprobs=True)
            [sequence] = result.sequences
            assert sequence.draft_logprobs is not None
            assert len(sequence.draft_logprobs) == result.usage.proposed_tokens
            assert sum(one.accepted for one in sequence.draft_logprobs) == result.usage.accepted_tokens


def test_a_head_for_multi_token_prediction_proposes_and_has_logprobs_of_its_own(heading: Stack):
    body = {"model": "tiny", "prompt": [0, 7, 8], "max_tokens": 60, "ignore_eos": True, "temperature": 0, "logprobs": 1}
    url = f"{heading.url}/v1/completions"
    plain = httpx.post(url, json=body | {"speculation": "off"}, timeout=60).json()["choices"][0]
    asked = body | {"include_draft_logprobs": True, "cache_salt": "other"}
    until = time.monotonic() + 200
    entries: list[dict[str, Any]] = []
    while len(entries) <= 5:
        assert time.monotonic() < until
        reply = httpx.post(url, json=asked, timeout=60).json()
        [choice] = reply["choices"]
        entries = choice["draft_logprobs"]

    assert choice["text"] == plain["text"]
    details = reply["usage"]["completion_tokens_details"]
    assert (details["speculation"], details["speculation_tokens"]) == ("mtp", 8)
    assert details["accepted_prediction_tokens"] == sum(entry["accepted"] for entry in entries)
    for entry in entries:
        assert entry["draft_logprob"] == pytest.approx(entry["logprob"], abs=1e-3)
    refused = httpx.post(url, json=body | {"speculation": "draft"}, timeout=60)
    assert (refused.status_code, "expected off or ngram or mtp" in refused.text) == (400, True), refused.text


def test_a_worker_without_speculation_refuses_the_field(stack: Stack):
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 4, "logprobs": 0, "include_draft_logprobs": True}
    reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 400
    assert "include_draft_logprobs" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "include_draft_logprobs"
    del body["logprobs"]
    reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert (reply.status_code, "needs `logprobs`" in reply.text) == (400, True)


def test_a_request_chooses_what_proposes_and_usage_says_it(stack: Stack, speculating: Stack, drafting: Stack):
    body = {**REPEATING, "prompt": PROMPT, "temperature": 0}
    asked = {
        "off": (speculating, {"speculation": "off"}, None),
        "usual": (speculating, {}, ("ngram", 8)),
        "fewer": (drafting, {"speculation_tokens": 2}, ("draft", 2)),
        "more": (drafting, {"speculation": "ngram", "speculation_tokens": 16}, ("ngram", 8)),
    }
    texts = set()
    for one, options, used in asked.values():
        reply = httpx.post(f"{one.url}/v1/completions", json=body | options, timeout=60).json()
        details = reply["usage"].get("completion_tokens_details")
        found = details and (details["speculation"], details["speculation_tokens"])
        assert found == used, options
        texts.add(reply["choices"][0]["text"])
    texts.add(complete(stack, temperature=0)["choices"][0]["text"])
    assert len(texts) == 1
    with Client(drafting.url) as client:
        result = client.generate("demo", PROMPT, max_tokens=4, speculation="draft", speculation_tokens=3)
        assert (result.usage.speculation, result.usage.speculation_tokens) == ("draft", 3)
        scored = client.score("demo", [([5], [6])])
        assert (scored.usage.speculation, scored.usage.speculation_tokens) == (None, 0)


@pytest.mark.parametrize(
    ("options", "field", "sentence"),
    [
        ({"speculation": "draft"}, "speculation", "expected off or ngram, which this worker has"),
        ({"speculation": "mtp"}, "speculation", "mtp"),
        ({"speculation_tokens": 0}, "speculation_tokens", ">= 1"),
        ({"speculation_tokens": 17}, "speculation_tokens", "<= 16"),
        ({"speculation": "off", "speculation_tokens": 2}, "speculation_tokens", "does not go with `speculation` off"),
    ],
)
def test_a_choice_that_a_worker_has_not_is_refused_by_name(
    speculating: Stack, options: dict[str, Any], field: str | None, sentence: str
):
    body = {"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, **options}
    reply = httpx.post(f"{speculating.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], sentence in error["message"]) == (field, True), error


CHOICE = {"speculation": "draft", "speculation_tokens": 3}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "demo", "input": "a", "max_output_tokens": 30, "temperature": 0, "ignore_eos": True},
    "/v1/messages": {"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 30, "top_k": 1},
    "/generate": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}},
}
WITH_LOGPROBS = {"/v1/responses": {"include": ["message.output_text.logprobs"]}, "/generate": {"return_logprob": True}}


def post(stack: Stack, path: str, **options: Any) -> httpx.Response:
    return httpx.post(stack.url + path, json=ROUTES[path] | options, timeout=60)


def answer_of(reply: httpx.Response) -> object:
    """Return the texts and ids of an answer, whatever its dialect."""
    assert reply.status_code == 200, reply.text
    body = reply.json()
    content = [part.get("text") for item in body.get("output", [body]) for part in item.get("content", [])]
    return content, body.get("text") if "output_ids" in body else None, body.get("output_ids")


@pytest.mark.parametrize("path", ROUTES)
def test_other_dialects_choose_too_and_have_the_same_answers(stack: Stack, drafting: Stack, path: str):
    assert answer_of(post(drafting, path, **CHOICE)) == answer_of(post(stack, path))
    for options, field in (({"speculation": "mtp"}, "speculation"), ({"speculation_tokens": 17}, "speculation_tokens")):
        refused = post(drafting, path, **options)
        assert (refused.status_code, field in refused.text) == (400, True), refused.text
    off = post(drafting, path, speculation="off", speculation_tokens=2)
    assert (off.status_code, "does not go with `speculation` off" in off.text) == (400, True)


@pytest.mark.parametrize("path", ROUTES)
def test_other_dialects_report_proposed_tokens_or_refuse_the_field(drafting: Stack, path: str):
    asked = {**CHOICE, "include_draft_logprobs": True}
    without = post(drafting, path, **asked)
    assert (without.status_code, "include_draft_logprobs" in without.text) == (400, True), without.text
    if path not in WITH_LOGPROBS:
        return
    until = time.monotonic() + 200
    entries: list[dict[str, Any]] = []
    while len(entries) <= 5:
        assert time.monotonic() < until
        body = post(drafting, path, **asked, **WITH_LOGPROBS[path]).json()
        entries = body.get("meta_info", body)["draft_logprobs"]
    assert all(entry.keys() == {"position", "token_id", "draft_logprob", "logprob", "accepted"} for entry in entries)
    accepted: list[bool] = []
    while True not in accepted:
        assert time.monotonic() < until
        lines = post(drafting, path, **asked, **WITH_LOGPROBS[path], stream=True).text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        last = events[-1].get("response", events[-1].get("meta_info"))
        accepted = [entry["accepted"] for entry in last["draft_logprobs"]]


def test_an_answer_in_a_form_is_that_of_plain_generation(stack: Stack, speculating: Stack):
    schema = {"type": "array", "minItems": 6, "maxItems": 6, "items": {"enum": ["again"]}}
    form = {"type": "json_schema", "json_schema": {"name": "words", "schema": schema}}
    options = {"response_format": form, "logit_bias": {}, "ignore_eos": False, "max_tokens": 150, "temperature": 0}
    text = json.dumps(["again"] * 6)
    plain, found = (complete(one, **options, logprobs=1) for one in (stack, speculating))
    until = time.monotonic() + 200
    while not accepted_tokens(found):
        assert time.monotonic() < until
        found = complete(speculating, **options, logprobs=1, speculation="ngram")

    assert json.loads(found["choices"][0]["text"]) == json.loads(text)
    assert found["choices"][0]["text"] == plain["choices"][0]["text"]
    right, logprobs = (one["choices"][0]["logprobs"]["token_logprobs"] for one in (plain, found))
    assert logprobs == pytest.approx(right, abs=1e-4)


def test_a_worker_without_speculation_takes_off_alone(stack: Stack):
    assert complete(stack, speculation="off")["usage"].get("completion_tokens_details") is None
    for options in ({"speculation": "ngram"}, {"speculation_tokens": 2}):
        reply = httpx.post(f"{stack.url}/v1/completions", json={**REPEATING, "prompt": PROMPT, **options}, timeout=60)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == next(iter(options))


LONG = [1209, 274, 312, 885, 100, 200, 300, 400] * 50


def test_a_part_of_a_long_prompt_is_computed_and_told(drafting: Stack):
    body = {"model": "demo", "prompt": LONG, "max_tokens": 4, "temperature": 0, "specprefill": True}
    reply = httpx.post(f"{drafting.url}/v1/completions", json=body | {"specprefill_keep_pct": 25}, timeout=60).json()
    assert 100 <= reply["usage"]["prompt_tokens_details"]["kept_tokens"] <= 131
    assert reply["usage"]["prompt_tokens"] == 400
    chunks = stream(drafting, body | {"stream_options": {"include_usage": True}})
    assert 80 <= chunks[-1]["usage"]["prompt_tokens_details"]["kept_tokens"] <= 111
    with Client(drafting.url) as client:
        for _ in range(2):  # the second is computed again, not taken from the result cache
            result = client.generate("demo", LONG, max_tokens=4, temperature=0, specprefill=True)
            assert (result.stamp.approximate, result.stamp.cached) == ("specprefill", False)
            assert 80 <= (result.usage.kept_tokens or 0) <= 111
        whole = client.generate("demo", LONG, max_tokens=4, temperature=0)
        assert (whole.stamp.approximate, whole.stamp.cached, whole.usage.kept_tokens) == (None, False, None)
        short = client.generate("demo", PROMPT, max_tokens=4, temperature=0, specprefill=True)
        assert (short.stamp.approximate, short.usage.kept_tokens) == (None, len(PROMPT))


def test_a_response_counts_the_tokens_of_its_prompt_that_were_kept(drafting: Stack):
    body = {"model": "demo", "input": "import os " * 300, "max_output_tokens": 2, "specprefill": True}
    whole = httpx.post(f"{drafting.url}/v1/responses", json=body | {"specprefill": False}, timeout=60).json()["usage"]
    reply = httpx.post(f"{drafting.url}/v1/responses", json=body, timeout=60).json()
    streamed = stream(drafting, body, "/v1/responses")[-1]["response"]
    shown = httpx.get(f"{drafting.url}/v1/responses/{reply['id']}", timeout=60).json()
    for usage in (reply["usage"], streamed["usage"], shown["usage"]):
        assert usage["input_tokens"] == whole["input_tokens"] >= 256
        assert 0 < usage["input_tokens_details"]["kept_tokens"] < usage["input_tokens"] / 2
    assert "kept_tokens" not in whole["input_tokens_details"]


def test_the_usage_of_a_batch_adds_up_the_tokens_that_were_kept(drafting: Stack):
    with Client(drafting.url) as client:
        sparse = client.generate("demo", LONG, max_tokens=1, specprefill=True)
        whole = client.generate("demo", LONG, max_tokens=1)
    usages = [wire.BatchUsage.of_results([result]) for result in (sparse, whole)]
    kept = [each.input_tokens_details.kept_tokens for each in (*usages, usages[0] + usages[1], usages[1] + usages[1])]
    assert kept == [sparse.usage.kept_tokens, UNSET, sparse.usage.kept_tokens, UNSET]
    assert wire.BatchUsage.of_results([sparse, sparse]) == usages[0] + usages[0]


@pytest.mark.parametrize("path", ["/v1/messages", "/generate", "/inference/v1/generate"])
def test_a_dialect_that_does_not_report_a_part_of_a_prompt_refuses_to_compute_one(drafting: Stack, path: str):
    bodies = ROUTES | {"/inference/v1/generate": {"token_ids": LONG, "sampling_params": {"max_tokens": 2}}}
    reply = httpx.post(drafting.url + path, json=bodies[path] | {"specprefill": True}, timeout=60)
    assert (reply.status_code, "specprefill" in reply.text) == (400, True), reply.text


def last_fingerprints(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """Return the fingerprint in the last chunk of each choice; check that no other chunk has one."""
    assert all(bool(chunk["choices"][0]["finish_reason"]) == ("system_fingerprint" in chunk) for chunk in chunks)
    return {
        chunk["choices"][0]["index"]: chunk["system_fingerprint"] for chunk in chunks if "system_fingerprint" in chunk
    }


@pytest.mark.parametrize("prompts", [[PROMPT, LONG], [LONG, PROMPT]])
def test_one_approximate_choice_marks_its_reply_and_the_end_of_its_stream(drafting: Stack, prompts: list[list[int]]):
    body = {"model": "demo", "prompt": prompts, "max_tokens": 2, "temperature": 0}
    exact, sparse = (
        httpx.post(f"{drafting.url}/v1/completions", json=body | {"specprefill": wanted}, timeout=60).json()
        for wanted in (False, True)
    )
    assert sparse["system_fingerprint"] != exact["system_fingerprint"]
    found = last_fingerprints(stream(drafting, body | {"specprefill": True}))
    assert found == {
        index: (sparse if prompt is LONG else exact)["system_fingerprint"] for index, prompt in enumerate(prompts)
    }


def test_a_streamed_chat_says_that_it_is_approximate(drafting: Stack):
    body = {"model": "demo", "messages": [{"role": "user", "content": "import os " * 300}], "max_tokens": 2, "n": 2}
    whole, sparse = (
        last_fingerprints(stream(drafting, body | {"specprefill": wanted}, "/v1/chat/completions"))
        for wanted in (False, True)
    )
    assert whole.keys() == sparse.keys() == {0, 1}
    assert len({*whole.values()}) == len({*sparse.values()}) == 1
    assert whole[0] != sparse[0]


@pytest.mark.parametrize(
    ("options", "field", "sentence"),
    [
        ({"specprefill": True}, "specprefill", "served without a draft model"),
        ({"specprefill_keep_pct": 20}, "specprefill_keep_pct", "needs `specprefill`: true"),
        ({"specprefill": True, "specprefill_keep_pct": 0.5}, "specprefill_keep_pct", ">= 1"),
        ({"specprefill": True, "specprefill_keep_pct": 101}, "specprefill_keep_pct", "<= 100"),
        ({"specprefill": True, "speculation": "ngram"}, "specprefill", "does not go with `speculation` ngram"),
        ({"specprefill": True, "speculation_tokens": 2}, "specprefill", "does not go with `speculation_tokens`"),
        ({"specprefill": True, "echo": True, "logprobs": 0}, "specprefill", "does not go with `echo`"),
        ({"specprefill": True, "prompt_logprobs": 0}, "specprefill", "does not go with `prompt_logprobs`"),
    ],
)
def test_a_part_of_a_prompt_is_refused_by_name(stack: Stack, options: dict[str, Any], field: str, sentence: str):
    body = {"model": "demo", "prompt": LONG, "max_tokens": 4, **options}
    reply = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], sentence in error["message"]) == (field, True), error


def test_a_job_refuses_speculation_tokens_beside_a_part_of_its_prompt():
    wire.Generate(model="demo", prompt=LONG, specprefill=True, speculation="off")
    with pytest.raises(ValueError, match="`specprefill` does not go with `speculation_tokens`"):
        wire.Generate(model="demo", prompt=LONG, specprefill=True, speculation_tokens=2)


def test_a_score_job_knows_no_part_of_a_prompt(stack: Stack):
    body = {"type": "score", "model": "demo", "items": [{"prompt": "a", "completion": "b"}], "specprefill": True}
    reply = httpx.post(f"{stack.url}/v1/jobs", json=body, timeout=60)
    assert (reply.status_code, "specprefill" in reply.text) == (400, True), reply.text
