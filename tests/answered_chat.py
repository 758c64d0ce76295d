"""The answer to a chat from its tokens, whole and streamed, by the code of worker and API. No process, no model."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from scorepool import wire
from scorepool.api.dialects.deltas import ChoiceStream
from scorepool.api.dialects.openai.chat import ChatRequest, to_request
from scorepool.api.dialects.openai.chat_reply import ChatChoice, ChatChoiceChunk, to_chat_completion, to_chunk
from scorepool.engine import ChatCodec
from scorepool.engine.sampling.stop import check_stop
from scorepool.worker.inference.job_stream import JobStream
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.result import to_result
from scorepool.worker.inference.translate import to_sequences
from tests.chat_formats import TOOLS
from tests.worker.fake import finish

PROVENANCE = wire.Provenance(
    model="m",
    fingerprint="f",
    dtype="float32",
    quantization=None,
    adapter=None,
    mode="default",
    backend="b",
    versions={},
)


class Run:
    """The token deltas and the result that a worker sends for an answer of these tokens."""

    def __init__(self, codec: ChatCodec, token_ids: Sequence[int], steps: Sequence[int] = (1,), **options: Any) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "Go."}], "logprobs": True, "tools": TOOLS}
        self.body = wire.parse(json.dumps(body | options).encode(), ChatRequest)
        self.codec = codec
        request = to_request(self.body, timeout_s=60)
        (prepared,) = finish(to_sequences(request, self.codec, context_length=100_000))
        self.deltas = list(self._run(prepared, token_ids, steps))
        self.result = to_result(request, [prepared], self.codec, PROVENANCE)

    def _run(
        self, prepared: PreparedSequence, token_ids: Sequence[int], steps: Sequence[int]
    ) -> Iterator[wire.TokenDelta]:
        """Sample these tokens, and emit after as many as `steps` says, over and over."""
        row = prepared.sequence
        job_stream = self.job_stream = JobStream("j", [prepared], with_logprobs=True, codec=self.codec)
        sampling = row.sampling
        assert sampling is not None
        row.sampling = replace(sampling, max_tokens=len(token_ids))
        publishes = [flag for size in steps for flag in [False] * (size - 1) + [True]]
        for number, token_id in enumerate(token_ids):
            row.token_ids.append(token_id)
            row.columns.logprobs.append(-float(number))
            row.columns.sampled_logprobs.append(-float(number))
            check_stop(row, self.codec.tokenizer.token_bytes, self.codec.tokenizer.eos_ids)
            if row.is_done:
                return
            if publishes[number % len(publishes)]:
                job_stream.on_step([row])
                yield from job_stream.take(10**6)[0]

    def pieces(self, draw: Callable[[st.SearchStrategy[int]], int]) -> Iterator[wire.TokenDelta]:
        """Take the tokens again and again, in pieces of any size. None begins after the end of those before it."""
        self.job_stream.rewind(0, 0)
        for _ in range(draw(st.integers(1, 8))):
            (delta,) = self.job_stream.take(draw(st.integers(1, 200)))[0] or [None]
            if delta is not None:
                yield delta
                self.job_stream.rewind(0, draw(st.integers(0, delta.first + len(delta.token_ids))))

    @property
    def whole(self) -> ChatChoice:
        return to_chat_completion(self.body, self.result, "id", 0).choices[0]

    def chunks(self, deltas: Sequence[wire.TokenDelta]) -> list[ChatChoiceChunk]:
        stream = ChoiceStream(0)
        sent = [new for delta in deltas for new in stream.add_runs(delta)]
        sent += stream.end_runs(self.result.sequences[0])
        return [to_chunk(self.body, delta) for delta in sent]


def joined(chunks: list[ChatChoiceChunk]) -> tuple[str, str, list[Any], list[Any], str | None]:
    deltas = [chunk.delta for chunk in chunks]
    return (
        "".join(delta.content or "" for delta in deltas),
        "".join(delta.reasoning_content or "" for delta in deltas),
        [call for delta in deltas for call in delta.tool_calls or ()],
        [entry for chunk in chunks for entry in chunk.logprobs.content],
        chunks[-1].finish_reason,
    )
