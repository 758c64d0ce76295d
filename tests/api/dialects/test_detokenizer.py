"""A completion from its tokens: the joined chunks of a stream equal the whole reply. No process, no model."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from scorepool import wire
from scorepool.api.dialects.deltas import ChoiceStream
from scorepool.api.dialects.openai.completion_reply import CompletionChoiceChunk, to_chunk, to_completion
from scorepool.api.dialects.openai.completions import CompletionRequest, to_requests
from scorepool.engine.sampling.stop import check_stop
from scorepool.worker.inference.job_stream import JobStream
from scorepool.worker.inference.provenance import provenance_of
from scorepool.worker.inference.result import to_result
from scorepool.worker.inference.translate import to_sequences
from tests.worker.fake import FakeChatCodec, FakeEngine, FakeTokenizer, finish

PROVENANCE = provenance_of("demo", FakeEngine.model_info)
TOKENS = [b"a", b"b", b"<s>", b"<e>", b"\xf0\x9f", b"\x99\x82", b"ab", b""]
SPECIAL, EOS = 2, 3


class Tokenizer(FakeTokenizer):
    eos_ids = frozenset({EOS})
    vocab_size = len(TOKENS)
    special_token_ids = frozenset({SPECIAL, EOS})

    def token_bytes(self, token_id: int) -> bytes:
        return TOKENS[token_id]


TOKENIZER = Tokenizer()
CODEC = FakeChatCodec(TOKENIZER)


def run(token_ids: list[int], options: dict[str, Any]) -> tuple[CompletionRequest, list[wire.TokenDelta], wire.Result]:
    """Build the token deltas and the result that a worker sends for a sequence of these tokens."""
    body = {"model": "demo", "prompt": [0], "max_tokens": len(token_ids), "logprobs": 0, "return_token_ids": True}
    request = wire.parse(json.dumps(body | options).encode(), CompletionRequest)
    (generate,) = to_requests(request, 60)
    (prepared,) = finish(to_sequences(generate, CODEC, 100))
    row = prepared.sequence
    job_stream = JobStream("j", [prepared], with_logprobs=True, codec=CODEC)
    deltas = []
    if generate.prompt_logprobs:
        row.append_unpredicted()
        row.columns.logprobs += [-1.0] * (len(row.token_ids) - 1)
        row.columns.ranks += [1] * (len(row.token_ids) - 1)
    for number, token_id in enumerate(token_ids):
        row.token_ids.append(token_id)
        row.columns.logprobs.append(-float(number))
        row.columns.sampled_logprobs.append(-float(number))
        row.columns.ranks += [1] * row.rank
        check_stop(row, TOKENIZER.token_bytes, TOKENIZER.eos_ids)
        job_stream.on_step([row])
        deltas += job_stream.take(10**6)[0]
        if row.is_done:
            break
    return request, deltas, to_result(generate, [prepared], CODEC, PROVENANCE)


@settings(max_examples=400)
@given(
    token_ids=st.lists(st.integers(0, len(TOKENS) - 1), min_size=1, max_size=9),
    options=st.fixed_dictionaries(
        {
            "stop": st.lists(st.sampled_from(["ab", "ba", "a<s>", "<e>", "🙂", "bb"]), max_size=2),
            "stop_token_ids": st.lists(st.sampled_from([0, SPECIAL, 4, 6, 7]), max_size=1),
            "ignore_eos": st.booleans(),
            "include_stop_str_in_output": st.booleans(),
            "skip_special_tokens": st.booleans(),
        }
    ),
    lost=st.sets(st.integers(0, 8)),
)
def test_joined_chunks_equal_the_whole_text_and_the_text_its_tokens(
    token_ids: list[int], options: dict[str, Any], lost: set[int]
):
    body, deltas, result = run(token_ids, options)
    (whole,) = to_completion(body, [result], "id", 0).choices
    stream = ChoiceStream(0)
    sent = [new for n, delta in enumerate(deltas) if n not in lost and (new := stream.add(delta))]
    chunks: list[CompletionChoiceChunk] = [to_chunk(body, delta) for delta in (*sent, stream.end(result.sequences[0]))]

    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert [offset for chunk in chunks for offset in chunk.logprobs.text_offset] == whole.logprobs.text_offset
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (whole.finish_reason, whole.stop_reason)

    kept = [token_id for token_id in whole.token_ids if not options["skip_special_tokens"] or token_id not in (2, 3)]
    assert b"".join(map(TOKENIZER.token_bytes, kept)).decode(errors="replace").startswith(whole.text.rstrip("\ufffd"))
    if whole.finish_reason == "length":
        assert len(whole.token_ids) == len(token_ids)
        assert b"".join(map(TOKENIZER.token_bytes, kept)).decode(errors="replace") == whole.text
    elif whole.stop_reason is None:
        assert whole.token_ids[-1] == EOS
        assert not options["ignore_eos"]
    else:
        assert whole.stop_reason in (*options["stop"], *options["stop_token_ids"])
        is_shown = options["include_stop_str_in_output"] and not options["skip_special_tokens"]
        if is_shown:
            token_text = (
                whole.stop_reason
                if isinstance(whole.stop_reason, str)
                else TOKENS[whole.stop_reason].decode(errors="replace")
            )
            assert whole.text.endswith(token_text)


@given(
    prompt=st.lists(st.sampled_from([0, 4, 5, 6]), min_size=1, max_size=3),
    token_ids=st.lists(st.integers(0, len(TOKENS) - 1), min_size=1, max_size=5),
    skips=st.booleans(),
)
def test_generated_text_is_the_same_if_the_prompt_is_reported(prompt: list[int], token_ids: list[int], skips: bool):
    """A prompt of token ids may end inside a character."""
    options = {"prompt": prompt, "skip_special_tokens": skips}
    texts = []
    for reported in ({}, {"prompt_logprobs": 0}):
        body, _, result = run(token_ids, options | reported)
        (choice,) = to_completion(body, [result], "id", 0).choices
        texts.append((choice.text, choice.logprobs.text_offset))
    assert texts[0] == texts[1]
