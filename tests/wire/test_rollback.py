"""A roll-back: workers of the previous release read every request of this API that uses only features they have."""

from typing import Any, Literal

import msgspec
import pytest

from scorepool import wire
from tests.wire.release_0_1_0 import FIELDS, REQUIRED

NESTED = {"items": "ScoreItem", "messages": "Message", "tools": "Tool", "tool_calls": "ToolCall"}
TAGS = {"Score": "score", "Generate": "generate", "Tokenize": "tokenize"}
KINDS = {"Score": wire.Score, "Generate": wire.Generate, "Tokenize": wire.Tokenize}

CHAT = [{"role": "user", "content": "a"}]
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "name": "f", "arguments": {}}]}
LEAST: dict[str, dict[str, Any]] = {
    "Score": {"type": "score", "model": "demo", "items": [{"prompt": "a", "completion": "b"}]},
    "Generate": {"type": "generate", "model": "demo", "prompt": "a"},
    "Tokenize": {"type": "tokenize", "model": "demo", "prompt": "a"},
}
COMMON: list[dict[str, Any]] = [
    {}, {"priority": "low"}, {"timeout_s": 5}, {"expires_at": 2e9}, {"webhook": "https://hooks.example/"},
    {"wait_for_model": True},
]  # fmt: skip
CHANGES: dict[str, list[dict[str, Any]]] = {
    "Score": [
        *COMMON, {"items": [{"prompt": [1], "completion": [2]}]}, {"score": "all"}, {"top_logprobs": 3},
        {"temperature": 0.5}, {"rank": True}, {"entropy": True},
    ],
    "Generate": [
        *COMMON, {"prompt": [1, 2]}, {"prompt": None, "messages": [*CHAT, CALL]},
        {"prompt": None, "messages": CHAT, "tools": [TOOL], "tool_choice": "required", "allowed_tools": ["f"],
         "parallel_tool_calls": False},
        {"prompt": None, "messages": CHAT, "chat_template_kwargs": {"thinking": False}},
        {"max_tokens": None}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"seed": 0},
        {"logit_bias": {3: -1.0}}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.1},
        {"stop": ["x"]}, {"stop_token_ids": [2]}, {"ignore_eos": True}, {"min_tokens": 4},
        {"include_stop_str_in_output": True}, {"skip_special_tokens": False}, {"n": 2}, {"json_schema": {}},
        {"add_bos": False}, {"prompt_logprobs": True}, {"logprobs": False}, {"top_logprobs": 2}, {"rank": True},
        {"recompute": True}, {"stream": True},
    ],
    "Tokenize": [*COMMON, {"prompt": None, "messages": CHAT}, {"add_bos": False}],
}  # fmt: skip


# Required fields that may be left out beside a new field, which the previous release refuses by its name.
LEFT_OUT = {("ScoreItem", "prompt")}


def previous_release() -> Any:
    """Build the strict union of requests that a worker of the previous release decodes."""
    structs: dict[str, Any] = {}
    for name, fields in FIELDS.items():
        structs[name] = msgspec.defstruct(
            name,
            [
                (field, kind) if default == REQUIRED else (field, kind, default)
                for field, default in fields.items()
                for kind in [list[structs[NESTED[field]]] | None if field in NESTED else Any]
            ],
            tag=TAGS.get(name),
            forbid_unknown_fields=True,
            kw_only=True,
        )
    return structs["Score"] | structs["Generate"] | structs["Tokenize"]


PREVIOUS = msgspec.msgpack.Decoder(previous_release())


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        pytest.param(kind, changes, id=f"{kind}-{'-'.join(changes) or 'least'}")
        for kind, each in CHANGES.items()
        for changes in each
    ],
)
def test_the_previous_release_reads_every_request_that_uses_only_its_features(kind: str, changes: dict[str, Any]):
    given = LEAST[kind] | changes
    request = wire.parse(msgspec.json.encode(given), wire.Request)

    read = PREVIOUS.decode(wire.encode(request))

    expected = {name: value for name, value in FIELDS[kind].items() if value != REQUIRED} | given
    del expected["type"]
    found = {name: getattr(read, name) for name in FIELDS[kind]}
    for name in NESTED.keys() & found.keys():  # a nested struct leaves out its own defaults
        found[name], expected[name] = bool(found[name]), bool(expected[name])
    assert found == expected


def test_a_sample_uses_every_feature_of_the_previous_release():
    for kind, changes in CHANGES.items():
        used = {name for each in [LEAST[kind], *changes] for name in each} - {"type"}
        assert used == FIELDS[kind].keys()


@pytest.mark.parametrize("kind", FIELDS)
def test_a_field_keeps_its_default_because_a_default_is_not_sent(kind: str):
    fields = {field.name: field for field in msgspec.structs.fields(getattr(wire, kind))}
    for name, default in FIELDS[kind].items():
        now = fields[name]
        if default == REQUIRED:
            assert now.required or (kind, name) in LEFT_OUT
        else:
            assert (now.default if now.default is not msgspec.NODEFAULT else now.default_factory()) == default


class LaterGenerate(wire.Generate, tag="generate", frozen=True, kw_only=True):
    """A generate request of a later release."""

    speculation: Literal["on", "off"] = "off"
    num_draft_tokens: int = 1000
    draft_scale: float = 0.5
    drafts: list[str] = msgspec.field(default_factory=list)
    draft_model: str | None = None


@pytest.mark.parametrize(
    "changes",
    [{}, {"speculation": "off", "num_draft_tokens": 1000, "draft_scale": 0.5, "drafts": [], "draft_model": None}],
    ids=["unset", "set to its default"],
)
def test_this_release_reads_a_request_of_a_later_one_that_uses_no_new_field(changes: dict[str, Any]):
    later = wire.parse(msgspec.json.encode(LEAST["Generate"] | changes), LaterGenerate)
    assert wire.decode_request(wire.encode(later)) == wire.Generate(model="demo", prompt="a")


def test_a_request_that_uses_a_new_field_is_refused_by_its_name():
    later = LaterGenerate(model="demo", prompt="a", speculation="on")
    with pytest.raises(wire.Invalid) as refusal:
        wire.decode_request(wire.encode(later))
    assert refusal.value.field == "speculation"


@pytest.mark.parametrize("kind", TAGS)
def test_a_value_that_equals_its_default_is_not_sent(kind: str):
    given = {name: value for name, value in FIELDS[kind].items() if value not in (REQUIRED, None)} | LEAST[kind]
    least = wire.parse(msgspec.json.encode(LEAST[kind]), wire.Request)
    for written, encoding in ((msgspec.json.encode(given), "json"), (msgspec.msgpack.encode(given), "msgpack")):
        assert wire.encode(wire.parse(written, wire.Request, encoding)) == wire.encode(least)
    nested = {"items": [wire.ScoreItem(prompt="a", completion="b")]} if kind == "Score" else {}
    built = KINDS[kind](**{name: value for name, value in given.items() if name != "type"} | nested)
    assert msgspec.msgpack.decode(wire.encode(built)).keys() == LEAST[kind].keys()


STAMP_0_1_0: dict[str, Any] = {
    "model": "demo",
    "fingerprint": "f",
    "dtype": "float32",
    "quantization": None,
    "adapter": None,
    "mode": "default",
    "backend": "cpu",
    "versions": {},
}


def test_results_and_model_cards_of_the_previous_release_are_read():
    result = {
        "type": "result",
        "sequences": [],
        "temperature": 1.0,
        "usage": {"prompt_tokens": 1, "completion_tokens": 0},
    }
    card = {"id": "demo", "context_length": 8, "vocab_size": 9, "self_test": "passed", "worker": "w"}

    outcome = wire.decode_outcome(msgspec.msgpack.encode(result | {"stamp": STAMP_0_1_0}))
    served = wire.parse(msgspec.msgpack.encode(card | {"stamp": STAMP_0_1_0}), wire.ServedModel, "msgpack")

    assert isinstance(outcome, wire.Result)
    assert outcome.stamp.verification is served.stamp.verification is served.surveyed is None


def test_an_api_of_a_release_without_links_reads_the_model_cards_of_this_one():
    fields: list[Any] = [("id", str), ("stamp", wire.Provenance), ("worker", str), ("created", int, 0)]
    earlier: Any = msgspec.defstruct("ServedModel", fields, kw_only=True)
    card = {"id": "demo", "context_length": 8, "vocab_size": 9, "self_test": "passed", "worker": "w"}
    served = wire.parse(msgspec.msgpack.encode(card | {"stamp": STAMP_0_1_0}), wire.ServedModel, "msgpack")
    measured = msgspec.structs.replace(served, link=wire.WorkerLink(round_trip_s=0.1, lease_s=20.0))

    assert served.link is None
    assert wire.parse(wire.encode(measured), wire.ServedModel, "msgpack") == measured
    assert wire.parse(wire.encode(measured), earlier, "msgpack").worker == "w"


def test_a_stamp_repeats_little_of_a_certificate():
    verified = wire.Verification(
        status="verified",
        by="ann@mac",
        at="2026-11-22T10:00:00+00:00",
        max_error_nats=9e-5,
        rms_error_nats=1e-6,
        certificate="f" * 16,
    )

    assert len(wire.encode(verified)) < 150
    assert wire.encode(wire.Verification(status="unverified", reason="r")) == msgspec.msgpack.encode(
        {"status": "unverified", "reason": "r"}
    )
