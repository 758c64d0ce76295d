"""A submission that is repeated under its Idempotency-Key is recognised by any release of the API."""

import msgspec
import pytest

from scorepool import wire
from scorepool.api.repositories.queue import fingerprint

SCORE = {"type": "score", "model": "demo", "items": [{"prompt": "a", "completion": " b"}]}
CHAT = {
    "type": "generate",
    "model": "demo",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 5,
    "temperature": 0,
    "logit_bias": {"5": 1.5},
    "stop": ["x"],
    "tools": [{"name": "f", "parameters": {}}],
}


def test_a_shared_prompt_is_part_of_the_fingerprint():
    items = [wire.ScoreItem(completion=" b")]
    shared = [wire.Score(model="demo", prompt=prompt, items=items) for prompt in ("a", "c")]
    assert len({fingerprint([request]) for request in shared}) == 2


@pytest.mark.parametrize(
    ("body", "of_release_0_1_0"),
    [
        (SCORE, "45b8143514383319a3e380a1c1b0893e"),
        (
            SCORE | {"items": [{"prompt": [1], "completion": [2]}], "top_logprobs": 3, "priority": "low"},
            "32319c0cdfd10567f58ef5b37786d2d2",
        ),
        ({"type": "generate", "model": "demo", "prompt": "hi"}, "4e043cae6cf894c4126c525e906787ce"),
        (CHAT, "0f9f9d018f7842f89dd52aa8e756b1d9"),
    ],
)
def test_a_submission_has_the_fingerprint_that_release_0_1_0_gave_it(body: dict[str, object], of_release_0_1_0: str):
    request = wire.parse(msgspec.json.encode(body), wire.Request)
    assert fingerprint([request]) == of_release_0_1_0
    assert fingerprint([wire.decode_request(wire.encode(request))]) == of_release_0_1_0
