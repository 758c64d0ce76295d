"""Every parameter that OpenAI's SDK knows works or is refused by its name. Defaults of other servers are accepted."""

import json
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import chat_completion_message_param
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from scorepool import wire
from scorepool.api.dialects.openai import foreign_fields
from scorepool.api.dialects.openai.endpoints import CHAT, COMPLETIONS, RESPONSES, TOKENIZE
from scorepool.api.dialects.protocol import Context, Endpoint
from scorepool.api.dialects.sglang import generate
from scorepool.api.dialects.sglang.endpoints import GENERATE
from scorepool.api.dialects.sglang.score import SCORE
from scorepool.api.dialects.unsupported import ANY
from scorepool.api.dialects.vllm import endpoints as vllm
from scorepool.api.dialects.vllm.classify import CLASSIFY
from scorepool.api.dialects.vllm.render import RENDER_CHAT
from scorepool.api.dialects.vllm.rerank import RERANK
from scorepool.api.dialects.vllm.score import SCORE_PAIRS
from tests.api.fake_worker import PROVENANCE, RESULT

COMPLETION_BODY: dict[str, Any] = {"model": "demo", "prompt": "a"}
CHAT_BODY: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
NAMES = {
    "completions": set(completion_create_params.CompletionCreateParamsBase.__annotations__) - {"prompt"},
    "chat": set(chat_create_params.CompletionCreateParamsBase.__annotations__) - {"messages"},
    "responses": set(response_create_params.ResponseCreateParamsBase.__annotations__) - {"input"},
}
# Values that clients send by default, or that change nothing in an answer.
BOTH: list[dict[str, Any]] = [
    {"n": 1, "seed": None, "stop": None, "user": "me", "logit_bias": {}, "stream": False},
    {"temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0},
    {"stop": []},
    {"top_k": 2**31 - 1},
    {"stream": True, "stream_options": {"include_usage": False, "include_obfuscation": False}},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}},
    {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "length_penalty": 1, "min_tokens": 0, "stop_token_ids": []},
    {"ignore_eos": False, "use_beam_search": False, "include_stop_str_in_output": False, "bad_words": []},
    {"allowed_token_ids": None},
    {"return_token_ids": False, "return_tokens_as_token_ids": False, "spaces_between_special_tokens": True},
    {"guided_json": None, "structured_outputs": None, "priority": 0, "request_id": "r-1", "vllm_xargs": None},
    {"lora_path": None, "regex": None, "no_stop_trim": False, "return_hidden_states": False, "rid": "r-1"},
    {"metadata": None, "service_tier": None, "store": False, "thinking_token_budget": None},
]
CHAT_ONLY: list[dict[str, Any]] = [
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"audio": None, "logprobs": False, "top_logprobs": 0, "metadata": {"a": "b"}, "modalities": ["text"]},
    {"parallel_tool_calls": True, "prediction": None, "response_format": {"type": "text"}, "store": False},
    {"prompt_cache_key": "a", "prompt_cache_retention": "in_memory", "safety_identifier": "a", "verbosity": "medium"},
    {"service_tier": "auto", "tool_choice": "auto", "tools": [], "max_completion_tokens": 5, "max_tokens": 5},
    {"chat_template_kwargs": {}, "reasoning_effort": None, "echo": False, "add_special_tokens": False},
    {"add_generation_prompt": True, "continue_final_message": False, "skip_special_tokens": True},
    {"separate_reasoning": True, "include_reasoning": True, "documents": None, "chat_template": None, "best_of": 1},
]
RESPONSES_ONLY: list[dict[str, Any]] = [
    {"previous_response_id": None, "conversation": None, "prompt": None, "background": False, "truncation": "disabled"},
    {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "safety_identifier": "a", "prompt_cache_key": "a"},
    {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "include": [], "max_output_tokens": None},
    {"reasoning": {"effort": None, "summary": "auto"}, "tools": [], "tool_choice": "auto", "max_tool_calls": 3},
    {"instructions": None, "parallel_tool_calls": True, "top_logprobs": 0, "include": ["reasoning.encrypted_content"]},
]
COMPLETIONS_ONLY: list[dict[str, Any]] = [
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"best_of": 1, "echo": False, "logprobs": None, "suffix": None, "max_tokens": None},
    {"prompt_logprobs": None, "add_special_tokens": True, "skip_special_tokens": True},
]


def parse(kind: str, options: dict[str, Any]) -> list[wire.Generate]:
    endpoint: Endpoint[Any]
    endpoint, body = {
        "chat": (CHAT, CHAT_BODY),
        "responses": (RESPONSES, {"model": "demo", "input": "Hi"}),
        "completions": (COMPLETIONS, COMPLETION_BODY),
    }[kind]
    parsed = endpoint.parse(json.dumps(body | options).encode())
    return list(endpoint.to_requests(parsed, Context(unique_id="u", timeout_s=60, created=0)))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in NAMES for name in sorted(NAMES[kind])])
def test_no_parameter_of_the_sdk_is_ignored(kind: str, name: str):
    """Each refuses a nonsensical value, also a parameter that a later SDK adds."""
    with pytest.raises(wire.Invalid) as caught:
        parse(kind, {name: {"no": {"such": "value"}}})

    assert caught.value.field is not None
    assert caught.value.field.startswith(name)
    assert name in caught.value.message


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (kind, one)
        for kind, own in [("chat", CHAT_ONLY), ("completions", COMPLETIONS_ONLY), ("responses", RESPONSES_ONLY)]
        for one in [*BOTH, *own]
    ],
)
def test_defaults_change_nothing(kind: str, options: dict[str, Any]):
    shown = {name: value for name, value in options.items() if name in ("stream", "max_tokens") and value}

    assert parse(kind, options) == parse(kind, shown)


@pytest.mark.parametrize(
    ("kind", "options", "field", "says"),
    [
        ("chat", {"store": True}, "store", "expected false, found True"),
        ("chat", {"modalities": ["text", "audio"]}, "modalities[1]", "Expected 'text', found 'audio'"),
        ("chat", {"service_tier": "flex"}, "service_tier", "Expected 'auto' | 'default', found 'flex'"),
        ("chat", {"verbosity": "low"}, "verbosity", "Expected 'medium', found 'low'"),
        ("chat", {"tool_choice": "any"}, "tool_choice", "Expected 'auto' | 'none' | 'required', found 'any'"),
        ("chat", {"tool_choice": "required"}, "tool_choice", "`tool_choice` needs `tools`"),
        ("chat", {"tool_choice": {"type": "custom"}}, "tool_choice.type", "Expected 'allowed_tools' | 'function'"),
        ("chat", {"tools": [{"type": "custom"}]}, "tools[0].type", "Expected 'function', found 'custom'"),
        ("chat", {"chat_template_kwargs": {"a": 10**30}}, "chat_template_kwargs", "<= 9223372036854775807"),
        ("chat", {"echo": True}, "echo", "expected false"),
        ("chat", {"add_special_tokens": True}, "add_special_tokens", "expected false"),
        ("chat", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        ("chat", {"prompt_logprobs": 1025}, "prompt_logprobs", "<= 1024"),
        ("chat", {"structural_tag": {}}, "structural_tag", "not supported here, expected null, found {}"),
        ("chat", {"priority": False}, "priority", "Expected `int | null`, got `bool`, found False"),
        ("chat", {"separate_reasoning": False}, "separate_reasoning", "expected true or null"),
        ("chat", {"guided_json": None, "no_such_field": None}, "no_such_field", "unknown field"),
        ("chat", {"chat_template": "{{ a }}"}, "chat_template", "not supported here"),
        ("chat", {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.inc", "false"),
        (
            "chat",
            {"response_format": {"type": "json_object"}, "ignore_eos": True},
            "response_format",
            "ends the answer",
        ),
        ("chat", {"response_format": {"type": "json_object"}, "min_tokens": 1}, "response_format", "nor `min_tokens`"),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": [CALL] * 600}] * 2},
            "messages",
            "has 1200 tool calls",
        ),
        ("chat", {"max_tokens": 5, "min_tokens": 6}, "min_tokens", "at most `max_completion_tokens`, 5"),
        ("responses", {"return_token_ids": True}, "return_token_ids", "expected false"),
        ("responses", {"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids", "expected false"),
        (
            "responses",
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
            "expected false",
        ),
        ("completions", {"min_tokens": 17}, "min_tokens", "at most `max_tokens`, 16"),
        ("completions", {"min_tokens": -1}, "min_tokens", ">= 0"),
        ("completions", {"stop_token_ids": [-5]}, "stop_token_ids[0]", ">= 0"),
        ("completions", {"bad_words": [""]}, "bad_words[0]", "length >= 1"),
        ("completions", {"allowed_token_ids": []}, "allowed_token_ids", "length >= 1"),
        ("chat", {"allowed_token_ids": [-1]}, "allowed_token_ids[0]", ">= 0"),
        ("completions", {"logprob_token_ids": [5]}, "logprob_token_ids", "needs `logprobs`"),
        ("completions", {"best_of": 1, "n": 2}, "best_of", "`best_of` must be at least `n`"),
    ],
)
def test_other_values_are_refused_by_name(kind: str, options: dict[str, Any], field: str, says: str):
    with pytest.raises(wire.Invalid) as caught:
        parse(kind, options)

    assert (caught.value.field or "").startswith(field)
    assert says in caught.value.message


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_stop_conditions_reach_the_worker(kind: str):
    asked = {"min_tokens": 2, "stop_token_ids": [5], "ignore_eos": True, "include_stop_str_in_output": True}

    (request,) = parse(kind, asked | {"max_tokens": 5})

    assert {name: getattr(request, name) for name in asked} == asked


@pytest.mark.parametrize(("kind", "default"), [("completions", True), ("chat", None)])
def test_special_tokens_are_skipped_unless_asked_for(kind: str, default: bool | None):
    """The default is vLLM's. A chat leaves it to the channels."""
    found = [parse(kind, options)[0].skip_special_tokens for options in ({"skip_special_tokens": False}, {})]

    assert found == [False, default]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "developer", "content": "a"},
        {"role": "system", "content": [{"type": "text", "text": "a"}], "name": "b"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "assistant", "content": "a", "refusal": None, "annotations": None, "audio": None, "tool_calls": None},
        {"role": "assistant", "content": "a", "annotations": [], "function_call": None, "reasoning_content": "b"},
        {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "look", "arguments": ""}}]},
        {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "look", "arguments": {}}}]},
        {"role": "assistant", "content": "a", "provider_specific_fields": {"refusal": None}},  # litellm's
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "a", "reasoning": "b", "annotations": [{"type": "url_citation"}]},
        {"role": "assistant", "content": None, "refusal": "a"},
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
    ],
)
def test_messages_of_other_clients_are_accepted(message: dict[str, Any]):
    messages = [CHAT_BODY["messages"][0], message]

    (request,) = parse("chat", {"messages": messages})

    assert request.messages is not None
    shown = request.messages[1]
    assert shown.content == ("a" if message.get("content") or message.get("refusal") else "")
    assert [call.arguments for call in shown.tool_calls] == [{}] * len(message.get("tool_calls") or ())


@pytest.mark.parametrize("kind", chat_completion_message_param.ChatCompletionMessageParam.__args__)
def test_no_field_that_the_sdk_has_in_messages_is_ignored(kind: Any):
    role = kind.__name__.split("Completion")[1].removesuffix("MessageParam").lower()
    for name in set(kind.__annotations__) - {"role"}:
        message = {"role": role, "content": "a", "tool_call_id": "c"} | {name: {"no": {"such": "value"}}}
        with pytest.raises(wire.Invalid) as caught:
            parse("chat", {"messages": [message]})
        assert (caught.value.field or "").startswith(("messages[0].role", f"messages[0].{name}")), name


def test_a_content_part_needs_its_type():
    with pytest.raises(wire.Invalid) as caught:
        parse("chat", {"messages": [{"role": "user", "content": [{"text": "a"}]}]})

    assert caught.value.field == "messages[0].content[0].type"
    assert "missing required field `type`" in caught.value.message


@pytest.mark.parametrize(
    ("kind", "table"), [("chat", foreign_fields.CHAT), ("completions", foreign_fields.COMPLETIONS)]
)
def test_null_and_the_default_of_every_foreign_field_pass(kind: str, table: dict[str, object]):
    nulls = dict.fromkeys(table)
    defaults = {name: "x" if value is ANY else value for name, value in table.items()}

    assert parse(kind, nulls) == parse(kind, defaults) == parse(kind, {})


@pytest.mark.parametrize(("kind", "other"), [("chat", COMPLETIONS), ("completions", CHAT)])
def test_null_in_every_field_of_the_other_route_passes(kind: str, other: Endpoint[Any]):
    """Gateways and SDKs with one set of options send all of them to both routes."""
    own = COMPLETION_BODY if kind == "completions" else CHAT_BODY
    nulls = dict.fromkeys(set(other.body_type.__struct_fields__) - own.keys())

    assert parse(kind, nulls) == parse(kind, {})


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (TOKENIZE, {"messages": CHAT_BODY["messages"]}),
        (SCORE, {"model": "demo", "query": "a", "items": ["b"], "label_token_ids": [5]}),
    ],
)
def test_null_and_the_defaults_of_foreign_fields_pass_on_other_routes(endpoint: Endpoint[Any], body: dict[str, Any]):
    for foreign in (dict.fromkeys(endpoint.foreign_fields), dict(endpoint.foreign_fields)):
        assert endpoint.parse(json.dumps(body | foreign).encode()) == endpoint.parse(json.dumps(body).encode())


def test_what_codex_says_of_itself_in_a_response_passes():
    body = {"model": "demo", "input": "a", "store": False, "include": ["reasoning.encrypted_content"]}
    described = body | {"client_metadata": {"session_id": "s"}}
    assert RESPONSES.parse(json.dumps(described).encode()) == RESPONSES.parse(json.dumps(body).encode())


def test_the_defaults_of_sglang_pass():
    """Check the defaults of `sampling_params` too, in JSON and in msgpack."""
    params = {name.partition(".")[2]: None for name in GENERATE.foreign_fields if "." in name}
    body = dict.fromkeys(name for name in GENERATE.foreign_fields if "." not in name)
    body |= {"text": "a", "sampling_params": params | {"n": 2}, "rid": "r-1"}

    for encoding, content in (("json", json.dumps(body).encode()), ("msgpack", wire.encode(body))):
        assert GENERATE.parse(content, encoding).params.n == 2

    with pytest.raises(wire.Invalid) as caught:
        GENERATE.parse(json.dumps({"text": "a", "sampling_params": {"stop_regex": "a+"}}).encode())
    assert caught.value.field == "sampling_params.stop_regex"


@pytest.mark.parametrize(
    "name", ["sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "model"]
)
def test_null_is_the_default_of_a_field_of_sglang(name: str):
    body = {"input_ids": [1], "return_logprob": True, name: None}
    parsed = GENERATE.parse(json.dumps(body).encode())
    without = GENERATE.parse(json.dumps({key: value for key, value in body.items() if value is not None}).encode())
    assert [*generate.to_requests(parsed, "demo", 60)] == [*generate.to_requests(without, "demo", 60)]


def test_null_is_the_default_of_every_sampling_parameter_of_sglang():
    nulls = dict.fromkeys(set(generate.SamplingParams.__struct_fields__) - {"max_new_tokens"})
    requests = [
        [*generate.to_requests(GENERATE.parse(json.dumps({"text": "a"} | params).encode()), "demo", 60)]
        for params in ({}, {"sampling_params": nulls}, {"sampling_params": nulls | {"max_new_tokens": None}})
    ]
    assert (
        requests[0]
        == requests[1]
        == [wire.Generate(model="demo", timeout_s=60, prompt="a", skip_special_tokens=True, logprobs=False)]
    )
    assert requests[2][0].max_tokens is None


@pytest.mark.parametrize("foreign", [{}, {"rid": None}])
def test_a_number_out_of_range_is_refused_by_its_field(foreign: dict[str, Any]):
    body = json.dumps(CHAT_BODY | {"seed": 0} | foreign).replace('"seed": 0', '"seed": 1e400').encode()
    with pytest.raises(wire.Invalid) as refused:
        CHAT.parse(body)
    assert (refused.value.field, refused.value.message) == ("seed", "seed: Number out of range")


@pytest.mark.parametrize("kind", ["chat", "completions", "responses"])
@pytest.mark.parametrize(("number", "priority"), [(-7, "high"), (0, "normal"), (None, "normal"), (3, "low")])
def test_the_sign_of_a_priority_decides(kind: str, number: int | None, priority: str):
    assert [job.priority for job in parse(kind, {"priority": number})] == [priority]


@pytest.mark.parametrize("kind", ["chat", "completions", "responses"])
def test_a_salt_keeps_cached_results_apart(kind: str):
    assert [job.cache_salt for job in parse(kind, {"cache_salt": "s"})] == ["s"]
    for wrong in ("", "s" * 257, 1):
        with pytest.raises(wire.Invalid) as refused:
            parse(kind, {"cache_salt": wrong})
        assert refused.value.field == "cache_salt"


HOW_TO_RUN = {"cache_salt": "s", "priority": -7, "if_weights": 4, "speculation": "ngram", "speculation_tokens": 2}


@pytest.mark.parametrize("options", [HOW_TO_RUN, {}])
def test_a_rendered_chat_runs_as_the_chat_does(options: dict[str, Any]):
    served = wire.ServedModel(id="m", stamp=PROVENANCE, context_length=64, vocab_size=9, self_test="passed", worker="w")
    context = Context(unique_id="u", timeout_s=60, created=0, served_model=served)
    chat = RENDER_CHAT.parse(json.dumps(CHAT_BODY | options).encode())

    rendered = wire.encode_json(RENDER_CHAT.to_reply(chat, [RESULT], context))

    [job] = vllm.GENERATE.to_requests(vllm.GENERATE.parse(rendered), context)
    [expected] = parse("chat", options)
    assert {name: getattr(job, name) for name in HOW_TO_RUN} == {name: getattr(expected, name) for name in HOW_TO_RUN}


PAIR_BODIES: list[tuple[Endpoint[Any], dict[str, Any]]] = [
    (RERANK, {"query": "a", "documents": ["b", "c"]}),
    (SCORE_PAIRS, {"text_1": "a", "text_2": ["b", "c"]}),
]


@pytest.mark.parametrize(
    ("endpoint", "body", "labels", "kind"),
    [
        *((*pair, ["LABEL_0"], wire.Classify) for pair in PAIR_BODIES),
        *((*pair, None, wire.Generate) for pair in PAIR_BODIES),
        (CLASSIFY, {"input": ["a", "b"]}, ["LABEL_0"], wire.Classify),
    ],
)
def test_a_salt_keeps_the_prefixes_of_pooling_routes_apart(
    endpoint: Endpoint[Any], body: dict[str, Any], labels: list[str] | None, kind: type[wire.Request]
):
    """A reranker that says yes or no generates; a classifier shares prefixes too."""
    served = wire.ServedModel(
        id="m",
        stamp=PROVENANCE,
        context_length=64,
        vocab_size=9,
        self_test="passed",
        worker="w",
        classifier=labels and wire.Classifier(labels=labels, activation="sigmoid"),
    )
    context = Context(unique_id="u", timeout_s=60, created=0, served_model=served, encoded_texts=[[1], [2], [3]])
    for given, expected in (({}, None), ({"cache_salt": None}, None), ({"cache_salt": "s"}, "s")):
        jobs = list(endpoint.to_requests(endpoint.parse(json.dumps(body | given).encode()), context))
        assert {type(job) for job in jobs} == {kind}
        assert {job.cache_salt for job in jobs} == {expected}


def test_the_job_that_reports_a_streamed_prompt_differs_in_what_generates_alone():
    generation = {"max_tokens", "n", "seed", "stop", "top_p", "speculation", "ignore_eos"}
    of_the_answer = {"stream", "prompt_logprobs", "skip_special_tokens"}
    options = {
        "echo": True,
        "stream": True,
        "logprobs": 2,
        "logprobs_mode": "processed_logprobs",
        "temperature": 0.5,
        "cache_salt": "s",
        "priority": -1,
        "if_weights": 3,
        "add_special_tokens": False,
        "truncate_prompt_tokens": 7,
        "truncation_side": "right",
        "n": 2,
        "seed": 4,
        "stop": "x",
        "top_p": 0.5,
        "speculation": "off",
        "ignore_eos": True,
    }
    generate, report = parse("completions", options)

    differing = {name for name in generate.__struct_fields__ if getattr(generate, name) != getattr(report, name)}
    assert differing == generation | of_the_answer
    assert (report.cache_salt, report.max_tokens, report.prompt_logprobs) == ("s", 0, True)
