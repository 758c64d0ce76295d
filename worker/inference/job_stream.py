"""Find the new tokens of a job that streams, after each step of the engine. Pure.

A token is emitted when no later token can take it back: it is not the beginning of a stop string, and its channel is
final.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items

from scorepool import wire
from scorepool.engine import ChatCodec, Sequence, TokenColumns
from scorepool.worker.inference.chat_answer import ParsedSlice, channels_and_calls
from scorepool.worker.inference.columns import delta_columns
from scorepool.worker.inference.result import indices_of
from scorepool.worker.inference.translate import PreparedSequence

MakeDelta = Callable[[], wire.TokenDelta]


class SequenceStream:
    """The progress of one sequence: the tokens that were read, and those that were emitted."""

    def __init__(self, prepared: PreparedSequence, index: int, codec: ChatCodec) -> None:
        chat_prompt = prepared.chat_prompt
        self.sequence = prepared.sequence
        self.index = index
        self.chat_prompt = chat_prompt
        self.skipped_ids = prepared.skipped_ids
        self.num_emitted = 0
        self._num_read = 0
        self._num_read_bytes = 0
        self._parser = None if chat_prompt is None else chat_prompt.output_parser(codec)
        self._token_bytes = codec.tokenizer.token_bytes

    def read(self) -> int:
        """Read the new tokens that begin no stop string. Return how many tokens may be emitted in total."""
        safe_bytes = len(self.sequence.text) - partial_stop_length(self.sequence)
        for token_id in self.sequence.token_ids[self.sequence.num_input_tokens + self._num_read :]:
            num_bytes = len(self._token_bytes(token_id))
            if self._num_read_bytes + num_bytes > safe_bytes:
                break
            self._num_read, self._num_read_bytes = self._num_read + 1, self._num_read_bytes + num_bytes
            if self._parser is not None:
                self._parser.read(token_id)
        return self._num_read if self._parser is None else self._parser.num_final

    def parsed(self, first: int, end: int) -> ParsedSlice | None:
        if self._parser is None:
            return None
        spans = [span for span in self._parser.spans if first <= span.start < end]  # calls are emitted whole
        return ParsedSlice(first, self._parser.channels[first:end], spans)


class JobStream:
    """The stream of one job's sequences. `on_step` runs on the engine's thread."""

    def __init__(self, job_id: str, prepared: Items[PreparedSequence], with_logprobs: bool, codec: ChatCodec) -> None:
        self._job_id = job_id
        self._streams = {each.sequence: SequenceStream(each, index, codec) for index, each in enumerate(prepared)}
        self._with_logprobs = with_logprobs
        self._codec = codec

    def on_step(self, sequences: Items[Sequence]) -> list[MakeDelta]:
        """Copy the new entries of these sequences; return functions that make the deltas on another thread."""
        deltas = [self._advance(self._streams[sequence]) for sequence in sequences if not sequence.is_done]
        return [delta for delta in deltas if delta is not None]

    def _advance(self, stream: SequenceStream) -> MakeDelta | None:
        sequence, first = stream.sequence, stream.num_emitted
        end = stream.read()
        if end == first:
            return None
        stream.num_emitted = end
        token_ids = sequence.token_ids[sequence.num_input_tokens + first : sequence.num_input_tokens + end]
        num_prompt_entries = len(sequence.columns) - sequence.num_generated
        entries = slice(num_prompt_entries + first, num_prompt_entries + end)
        columns = sequence.columns[entries] if self._with_logprobs else None
        parsed = stream.parsed(first, end)
        return lambda: self._make_delta(stream, first, token_ids, columns, parsed)

    def _make_delta(
        self,
        stream: SequenceStream,
        first: int,
        token_ids: list[int],
        columns: TokenColumns | None,
        parsed: ParsedSlice | None,
    ) -> wire.TokenDelta:
        token_bytes = self._codec.tokenizer.token_bytes
        fields = {} if columns is None else delta_columns(stream.sequence, columns, token_bytes)
        if stream.chat_prompt is not None and parsed is not None:
            channels, tool_calls = channels_and_calls(stream.chat_prompt, stream.sequence, parsed, self._codec)
            fields |= {"channels": channels, "tool_calls": tool_calls}
        return wire.TokenDelta(
            id=self._job_id,
            sequence=stream.index,
            first=first,
            token_ids=token_ids,
            token_bytes=[token_bytes(token_id) for token_id in token_ids],
            num_prompt_tokens=None if first else stream.sequence.num_input_tokens,
            skipped=[first + index for index in indices_of(stream.skipped_ids, token_ids)],
            **fields,  # type: ignore[arg-type]
        )


def partial_stop_length(sequence: Sequence) -> int:
    """Return how many bytes at the end of the text may be the beginning of a stop string."""
    stops = sequence.sampling.stop if sequence.sampling else ()
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(sequence.text)), longest, -1):
            if sequence.text.endswith(stop[:size]):
                longest = size
                break
    return longest
