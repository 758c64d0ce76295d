"""The forms of answers as vLLM and SGLang name them: whole matches, and 400s that say where."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from scorepool import Client, JobFailed
from scorepool.local.stack import Stack

SCHEMA = {
    "type": "object",
    "properties": {"depth": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["depth"],
    "additionalProperties": False,
}
REGEX = r"[A-C]{2}-\d"
CHOICE = ["yes", "no, never"]
EBNF = 'root ::= "<" root ">" | [xyz]'
LARK = 'start: "<" start ">" | /[xyz]/'
GUIDANCE = f"%llguidance {{}}\n\nstart: r\nr[capture]: R\nR: /{REGEX}/\n"
# as the package guidance asks a vLLM server
AS_GUIDANCE = {
    "guided_grammar": GUIDANCE,
    "structured_outputs": {"grammar": GUIDANCE},
    "guided_decoding_backend": "guidance",
}
GUIDED = [
    ({"structured_outputs": {"json": SCHEMA}}, "json"),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json"),
    ({"structured_outputs": {"json_object": True}}, "object"),
    ({"structured_outputs": {"regex": REGEX}}, "regex"),
    ({"structured_outputs": {"choice": CHOICE, "disable_any_whitespace": False}}, "choice"),
    ({"structured_outputs": {"grammar": EBNF}}, "grammar"),
    ({"structured_outputs": {"grammar": LARK}}, "grammar"),
    ({"guided_json": SCHEMA}, "json"),
    ({"guided_regex": REGEX}, "regex"),
    ({"guided_choice": CHOICE}, "choice"),
    ({"guided_grammar": EBNF}, "grammar"),
    (AS_GUIDANCE, "regex"),
    ({"regex": REGEX}, "regex"),
    ({"ebnf": EBNF}, "grammar"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, "json"),
]
SGLANG = [
    ({"json_schema": json.dumps(SCHEMA)}, "json"),
    ({"json_schema": "$$ANY$$"}, "any"),
    ({"regex": REGEX}, "regex"),
    ({"ebnf": EBNF}, "grammar"),
]
NATIVE = [
    ({"json_schema": SCHEMA}, "json"),
    ({"regex": REGEX}, "regex"),
    ({"choice": CHOICE}, "choice"),
    ({"grammar": LARK}, "grammar"),
]


def check(text: str, form: str, is_whole: bool) -> None:
    """Check a text that the model has ended; of one that was cut, only that it began so."""
    if form in ("json", "object", "any"):
        if is_whole:
            jsonschema.validate(json.loads(text), {"json": SCHEMA, "object": {"type": "object"}, "any": True}[form])
        assert form == "any" or text.startswith("{")
    elif form == "choice":
        assert text in CHOICE
    elif form == "regex":
        assert re.fullmatch(REGEX, text)
    elif is_whole:
        opened, closed = text.count("<"), text.count(">")
        assert opened == closed
        assert re.fullmatch(r"<*[xyz]>*", text)
    else:
        assert re.fullmatch(r"<*([xyz]>*)?", text)


@pytest.fixture(scope="module")
def http(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.url, timeout=60) as http:
        yield http


def chosen(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    found: dict[str, Any] = choice
    return found


@pytest.mark.parametrize(("options", "form"), GUIDED)
def test_completions_and_chats_have_the_form(http: httpx.Client, options: dict[str, Any], form: str):
    common = {"model": "demo", "max_tokens": 40, "seed": 1} | options
    completed = chosen(http.post("/v1/completions", json=common | {"prompt": "import"}))
    chat = chosen(http.post("/v1/chat/completions", json=common | {"messages": [{"role": "user", "content": "Hi"}]}))

    check(completed["text"], form, completed["finish_reason"] == "stop")
    check(chat["message"]["content"], form, chat["finish_reason"] == "stop")


@pytest.mark.parametrize(("outputs", "form"), [pair for pair in GUIDED if pair[0].keys() == {"structured_outputs"}])
def test_generated_tokens_have_the_form(http: httpx.Client, outputs: dict[str, Any], form: str):
    params = {"max_tokens": 40, "seed": 2} | outputs
    body = {"token_ids": [1209, 274], "sampling_params": params, "output_mode": "text"}

    choice = chosen(http.post("/inference/v1/generate", json=body))

    check(choice["text"], form, choice["finish_reason"] == "stop")


@pytest.mark.parametrize(("options", "form"), SGLANG)
def test_sglangs_answers_have_the_form(http: httpx.Client, options: dict[str, Any], form: str):
    params = {"max_new_tokens": 40, "sampling_seed": 3} | options
    reply = http.post("/generate", json={"text": "import", "sampling_params": params})

    assert reply.status_code == 200, reply.text
    check(reply.json()["text"], form, reply.json()["meta_info"]["finish_reason"]["type"] == "stop")


@pytest.mark.parametrize(("options", "form"), NATIVE)
def test_jobs_have_the_form_and_report_the_logprobs_of_the_model(native: Client, options: dict[str, Any], form: str):
    prompt = [1209, 274]
    [sequence] = native.generate("demo", prompt, max_tokens=40, seed=4, **options).sequences

    check(sequence.text, form, sequence.finish_reason == "stop")
    [scored] = native.score("demo", [(prompt, sequence.token_ids)]).sequences
    assert sequence.logprobs.values() == pytest.approx(scored.logprobs.values(), abs=1e-4)


def test_a_rendered_chat_takes_its_form_along(http: httpx.Client):
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "guided_choice": CHOICE}
    rendered = http.post("/v1/chat/completions/render", json=body).json()

    choice = chosen(http.post("/inference/v1/generate", json=rendered | {"output_mode": "text"}))

    assert choice["text"] in CHOICE


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"structured_outputs": {"regex": "a(b"}}, "structured_outputs.regex", "character 2: unclosed group"),
        (
            {"structured_outputs": {"grammar": "root ::= x"}},
            "structured_outputs.grammar",
            "line 1, column 10: rule 'x'",
        ),
        ({"structured_outputs": {"json": {"type": "foo"}}}, "structured_outputs.json", "foo"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "`json` is no JSON Schema"),
        ({"structured_outputs": {}}, "structured_outputs", "give exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "give exactly one of"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "Expected `null`"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "length >= 1"),
        ({"guided_regex": "(?=a)"}, "guided_regex", "character 1: look-around"),
        ({"guided_grammar": 'start: "a" | )'}, "guided_grammar", "line 1, column 14"),
        ({"ebnf": "expr ::= 'a'"}, "ebnf", "line 1, column 10: unexpected"),
        ({"regex": "a", "guided_regex": "b"}, "regex", "is given beside `guided_regex`"),
        ({"ebnf": "root ::= x", "guided_grammar": "root ::= x"}, "guided_grammar", "line 1, column 10: rule 'x'"),
        ({"regex": "a", "guided_choice": ["b"]}, "regex", "is given beside `guided_choice`"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "beside `response_format`"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "guided_choice", "neither `ignore_eos` nor"),
        ({"structural_tag": "{}"}, "structural_tag", "not supported here"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported here"),
    ],
)
def test_a_bad_form_is_refused_and_says_where(http: httpx.Client, options: dict[str, Any], field: str, says: str):
    for path, body in [
        ("/v1/completions", {"prompt": "import"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ]:
        reply = http.post(path, json={"model": "demo"} | body | options)

        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert error["param"] == field
        assert says in error["message"]


def test_other_routes_name_their_own_field(http: httpx.Client, native: Client):
    for path, body, field in [
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"structured_outputs": {"regex": "a("}}},
            "sampling_params.structured_outputs.regex",
        ),
        ("/generate", {"text": "a", "sampling_params": {"ebnf": "root ::= b"}}, "sampling_params.ebnf"),
        ("/generate", {"text": "a", "sampling_params": {"regex": "a("}}, "sampling_params.regex"),
    ]:
        reply = http.post(path, json=body)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == field
    with pytest.raises(JobFailed, match="regex: character 2: unclosed group"):
        native.generate("demo", "a", regex="a(b")
