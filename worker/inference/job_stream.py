"""Hold the tokens of a job that streams until they were published. Knows no Redis and no clock.

    engine's thread         on_step: finds the new tokens after each step
    publisher's thread      take: makes deltas of the tokens that were not taken yet
                            rewind: takes tokens again, which were not written or did not arrive

A token may be taken when no later token can remove it: it is not the beginning of a stop string, and its channel is
final. Tokens are kept as long as the job runs, and cost nearly no memory: their entries are those that the engine keeps
for the result.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

from scorepool import wire
from scorepool.engine import ChatCodec, Sequence, TokenColumns
from scorepool.worker.inference.chat_answer import ParsedSlice, channels_and_calls
from scorepool.worker.inference.columns import delta_columns
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.result import indices_of, target_bytes

TOKEN_BYTES = 24  # of a token in a delta, about, without its top logprobs
TOP_LOGPROB_BYTES = 16  # of one of them, about
TARGET_BYTES = 4  # of the logprob of a target


class PartialStop:
    """The end of a growing text that may be the beginning of one of the stop strings.

    It reads each byte once (Knuth-Morris-Pratt), because it runs on the engine's thread for each token.
    """

    def __init__(self, stops: Items[bytes]) -> None:
        self.length = 0  # bytes at the end of the text that may belong to a stop string that is not complete
        self._stops = [(stop, border_lengths(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # the longest beginning of each with which the text ends
        self._num_read = 0

    def read(self, text: bytes | bytearray) -> None:
        """Read what the text has gained since the last call."""
        added = bytes(text[self._num_read :])
        for index, (stop, borders) in enumerate(self._stops):
            matched = self._matched[index]
            for byte in added:
                while matched and stop[matched] != byte:
                    matched = borders[matched - 1]
                if stop[matched] == byte:
                    matched += 1
                if matched == len(stop):
                    matched = borders[matched - 1]
            self._matched[index] = matched
        self._num_read = len(text)
        self.length = max(self._matched, default=0)


@lru_cache(maxsize=256)  # the sequences of a job have the same stop strings
def border_lengths(pattern: bytes) -> list[int]:
    """Return for each beginning of the pattern the length of its longest proper beginning that is also its end."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders


class SequenceStream:
    """The progress of one sequence: the tokens that were read, those that may be taken, and those that were taken."""

    def __init__(self, prepared: PreparedSequence, index: int, with_logprobs: bool, codec: ChatCodec) -> None:
        chat_prompt = prepared.chat_prompt
        self.sequence = prepared.sequence
        self.index = index
        self.chat_prompt = chat_prompt
        self.skipped_ids = prepared.skipped_ids
        num_targets = prepared.sequence.targets.count(1) if prepared.sequence.targets else 0
        logprobs_bytes = TOP_LOGPROB_BYTES * prepared.sequence.top_logprobs + TARGET_BYTES * num_targets
        self.bytes_per_token = TOKEN_BYTES + with_logprobs * logprobs_bytes
        self.target_bytes = target_bytes(prepared, codec.tokenizer) if with_logprobs else None
        self.num_taken = 0
        self.weights: str | None = None  # those that compute it, once there are tokens
        self._with_logprobs = with_logprobs
        self._token_ids: list[int] = []  # those that may be taken
        self._columns = TokenColumns()  # their entries
        sampling = prepared.sequence.sampling
        self._partial_stop = PartialStop(sampling.stop if sampling else ())
        self._num_read = 0
        self._num_read_bytes = 0
        self._parser = None if chat_prompt is None else chat_prompt.output_parser(codec)
        self._token_bytes = codec.tokenizer.token_bytes

    @property
    def num_pending(self) -> int:
        """The number of tokens that were not taken."""
        return len(self._token_ids) - self.num_taken

    def on_step(self) -> None:
        """Copy the tokens that may now be taken. The engine's own lists have unequal lengths while it appends."""
        sequence, first, end = self.sequence, len(self._token_ids), self._read()
        if end == first:
            return
        if self.weights is None and (info := sequence.model_info) is not None:
            self.weights = wire.weights_of(info.fingerprint, info.adapter)
        self._token_ids += sequence.token_ids[sequence.num_input_tokens + first : sequence.num_input_tokens + end]
        if self._with_logprobs:
            num_prompt_entries = len(sequence.columns) - sequence.num_generated
            self._columns.extend(sequence.columns[num_prompt_entries + first : num_prompt_entries + end])

    def _read(self) -> int:
        """Read the new tokens that begin no stop string. Return how many tokens may be taken in total."""
        self._partial_stop.read(self.sequence.text)
        safe_bytes = len(self.sequence.text) - self._partial_stop.length
        for token_id in self.sequence.token_ids[self.sequence.num_input_tokens + self._num_read :]:
            num_bytes = len(self._token_bytes(token_id))
            if self._num_read_bytes + num_bytes > safe_bytes:
                break
            self._num_read, self._num_read_bytes = self._num_read + 1, self._num_read_bytes + num_bytes
            if self._parser is not None:
                self._parser.read(token_id)
        return self._num_read if self._parser is None else self._parser.num_final

    def take(self, max_tokens: int) -> "TakenTokens":
        """Take the next tokens: at most `max_tokens`, or one tool call, because calls are published whole."""
        first = self.num_taken
        end = min(first + max_tokens, len(self._token_ids))
        parsed = None
        if self._parser is not None:
            for span in self._parser.spans:
                if span.start < end < span.end:
                    end = span.start if span.start > first else span.end
            spans = [span for span in self._parser.spans if first <= span.start < end]
            earlier = [span for span in self._parser.spans if span.start < first]
            parsed = ParsedSlice(first, self._parser.channels[first:end], spans, earlier)
        self.num_taken = end
        columns = self._columns[first:end] if self._with_logprobs else None
        return TakenTokens(first, self._token_ids[first:end], columns, parsed)

    def rewind(self, first: int) -> None:
        """Take the tokens from index `first` on again, and all of a tool call in which that is."""
        for span in self._parser.spans if self._parser is not None else ():
            if span.start < first < span.end:
                first = span.start
        self.num_taken = min(self.num_taken, first)


@dataclass(frozen=True, slots=True)
class TakenTokens:
    """Tokens of one sequence from index `first` on, with their entries."""

    first: int
    token_ids: list[int]
    columns: TokenColumns | None
    parsed: ParsedSlice | None


class JobStream:
    """The streams of one job's sequences, in one run of the job.

    `run` is greater for each later run of the job.
    """

    def __init__(
        self, job_id: str, prepared: Items[PreparedSequence], with_logprobs: bool, codec: ChatCodec, run: int = 0
    ) -> None:
        self.job_id = job_id
        self._run = run
        self._streams = [SequenceStream(each, index, with_logprobs, codec) for index, each in enumerate(prepared)]
        self._of_sequence = {stream.sequence: stream for stream in self._streams}
        self._codec = codec
        self._lock = Lock()  # guards the streams; never held for longer than it takes to copy lists

    def on_step(self, sequences: Items[Sequence]) -> None:
        """Copy the new entries of these sequences. Called on the engine's thread."""
        with self._lock:
            for sequence in sequences:
                if not sequence.is_done:
                    self._of_sequence[sequence].on_step()

    @property
    def has_pending(self) -> bool:
        """True if there are tokens to take."""
        with self._lock:
            return any(stream.num_pending for stream in self._streams)

    def take(self, max_bytes: int) -> tuple[list[wire.TokenDelta], int]:
        """Take tokens of about `max_bytes`, at least one if there are any. Return their deltas and their size."""
        taken: list[tuple[SequenceStream, TakenTokens]] = []
        num_bytes = 0
        with self._lock:
            for stream in self._streams:
                if num_bytes < max_bytes and stream.num_pending:
                    tokens = stream.take(max(1, (max_bytes - num_bytes) // stream.bytes_per_token))
                    num_bytes += len(tokens.token_ids) * stream.bytes_per_token
                    taken.append((stream, tokens))
        return [self._make_delta(stream, tokens) for stream, tokens in taken], num_bytes

    def rewind(self, sequence: int, first: int) -> None:
        """Take the tokens of one sequence from index `first` on again. A sequence that does not exist is ignored."""
        with self._lock:
            for stream in self._streams[sequence : sequence + 1]:
                stream.rewind(first)

    def _make_delta(self, stream: SequenceStream, taken: TakenTokens) -> wire.TokenDelta:
        bytes_of = self._codec.tokenizer.bytes_of
        fields = {} if taken.columns is None else delta_columns(stream.sequence, taken.columns, bytes_of)
        if stream.chat_prompt is not None and taken.parsed is not None:
            channels, tool_calls = channels_and_calls(stream.chat_prompt, stream.sequence, taken.parsed, self._codec)
            fields |= {"channels": channels, "tool_calls": tool_calls}
        return wire.TokenDelta(
            id=self.job_id,
            run=self._run,
            sequence=stream.index,
            first=taken.first,
            token_ids=taken.token_ids,
            token_bytes=bytes_of(taken.token_ids),
            num_prompt_tokens=None if taken.first else stream.sequence.num_input_tokens,
            target_bytes=None if taken.first else stream.target_bytes,
            weights=None if taken.first else stream.weights,
            skipped=[taken.first + index for index in indices_of(stream.skipped_ids, taken.token_ids)],
            **fields,  # type: ignore[arg-type]
        )
