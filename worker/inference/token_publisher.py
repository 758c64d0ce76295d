"""Tokens of jobs that stream, on their way to Redis while the jobs run: one message for all rows that grew.

    engine's thread   on_step: copies new entries, and goes on
    this thread       one entry of the stream for all that has come since the last

Redis being slow or away holds up no step: then entries are joined into fewer messages, or are lost, and the API takes
them from the job's result.
"""

import logging
from collections.abc import Callable, Sequence
from math import inf
from threading import Condition, Thread

from msgspec.structs import replace
from redis import Redis
from redis.exceptions import RedisError

from scorepool import store, wire
from scorepool.engine import Sequence as Row
from scorepool.engine import TokenColumns, Tokenizer
from scorepool.store.scripts import load
from scorepool.worker.inference.chat_answer import Part, told
from scorepool.worker.inference.result import LEAST, numbers_of
from scorepool.worker.inference.translate import Translated

log = logging.getLogger(__name__)

GROW = load("grow.lua")

MAX_MESSAGES = 10_000  # of the stream, about: steps of all workers
CLOSE_TIMEOUT_S = 5.0
MAX_HELD = 100_000  # growths that wait for Redis; above it new ones are dropped


class TokenPublisher:
    """Takes growths from any thread and writes them with its own."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._grow = redis.register_script(GROW)
        self._changed = Condition()  # guards the two below
        self._growths: list[Callable[[], wire.TokenDelta]] = []
        self._is_closed = False
        self._thread = Thread(target=self._run, name="growth", daemon=True)
        self._thread.start()

    def put(self, growths: Sequence[Callable[[], wire.TokenDelta]]) -> None:
        """Called here when their turn comes, so that the caller does no work."""
        with self._changed:
            if len(self._growths) < MAX_HELD:
                self._growths += growths
                self._changed.notify()

    def close(self) -> None:
        """After what was put is written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        connected: Redis | None = None  # by a connection that is not fetched from the pool and checked at every step
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._growths or self._is_closed)
                if not self._growths:
                    return
                growths, self._growths = self._growths, []
            step: wire.TokenDeltas = [growth() for growth in growths]
            try:
                connected = connected or self._redis.client()
                self._grow([store.TOKENS], [MAX_MESSAGES, wire.encode(step)], connected)
            except RedisError as error:
                log.warning("tokens of %d rows are not streamed, their results will hold them: %r", len(step), error)


class _Told:
    """How far one row has come: read up to where no stop string may begin, told up to where it is settled."""

    def __init__(self, translated: Translated, place: int, tokenizer: Tokenizer) -> None:
        chat = translated.chat
        self.row = translated.row
        self.place = place
        self.chat = chat
        self.skipped_ids = translated.skipped_ids
        self.num_told = 0
        self._num_read = 0
        self._read_bytes = 0
        self._reader = None if chat is None else tokenizer.reader(chat.opening, chat.keeps_special)
        self._token_bytes = tokenizer.token_bytes

    def read(self) -> int:
        """The safe tokens that are new. How many may be told, of all."""
        safe_bytes = len(self.row.text) - begun_stop(self.row)
        for token_id in self.row.token_ids[self.row.num_input_tokens + self._num_read :]:
            num_bytes = len(self._token_bytes(token_id))
            if self._read_bytes + num_bytes > safe_bytes:
                break
            self._num_read, self._read_bytes = self._num_read + 1, self._read_bytes + num_bytes
            if self._reader is not None:
                self._reader.read(token_id)
        return self._num_read if self._reader is None else self._reader.num_settled

    def part(self, first: int, end: int) -> Part | None:
        if self._reader is None:
            return None
        spans = [span for span in self._reader.spans if first <= span.start < end]  # whole: an open one is not told
        return Part(first, self._reader.channels[first:end], spans)


class JobStream:
    """What has been told of one job's rows. `on_step` runs on the engine's thread."""

    def __init__(self, job_id: str, rows: Sequence[Translated], with_logprobs: bool, tokenizer: Tokenizer) -> None:
        self._job_id = job_id
        self._rows = {translated.row: _Told(translated, place, tokenizer) for place, translated in enumerate(rows)}
        self._with_logprobs = with_logprobs
        self._tokenizer = tokenizer

    def on_step(self, rows: Sequence[Row]) -> list[Callable[[], wire.TokenDelta]]:
        return [growth for row in rows if not row.is_done and (growth := self._grown(self._rows[row])) is not None]

    def _grown(self, so_far: _Told) -> Callable[[], wire.TokenDelta] | None:
        row, first = so_far.row, so_far.num_told
        end = so_far.read()
        if end == first:
            return None
        so_far.num_told = end
        token_ids = row.token_ids[row.num_input_tokens + first : row.num_input_tokens + end]
        num_prompt_entries = len(row.columns) - row.num_generated
        entries = slice(num_prompt_entries + first, num_prompt_entries + end)
        columns = row.columns[entries] if self._with_logprobs else None
        part = so_far.part(first, end)
        return lambda: self._growth(so_far, first, token_ids, columns, part)

    def _growth(
        self,
        so_far: _Told,
        first: int,
        token_ids: list[int],
        columns: TokenColumns | None,
        part: Part | None,
    ) -> wire.TokenDelta:
        spell = self._tokenizer.token_bytes
        top_ids = columns.top_ids if columns is not None and so_far.row.top_logprobs else None
        growth = wire.TokenDelta(
            id=self._job_id,
            sequence=so_far.place,
            first=first,
            token_ids=token_ids,
            token_bytes=[spell(token_id) for token_id in token_ids],
            logprobs=None if columns is None else wire.Floats(map(_finite, columns.logprobs)),
            top_ids=top_ids,
            top_bytes=None if top_ids is None else [[spell(token_id) for token_id in ids] for ids in top_ids],
            top_logprobs=(
                None
                if columns is None or top_ids is None
                else [wire.Floats(map(_finite, values)) for values in columns.top_logprobs]
            ),
            num_prompt_tokens=None if first else so_far.row.num_input_tokens,
            skipped=[first + number for number in numbers_of(so_far.skipped_ids, token_ids)],
        )
        if so_far.chat is None or part is None:
            return growth
        channels, tool_calls = told(so_far.chat, so_far.row, part, self._tokenizer)
        return replace(growth, channels=channels, tool_calls=tool_calls)


def begun_stop(row: Row) -> int:
    """How many bytes at the end of the row's text may be the beginning of a stop string."""
    stops = row.sampling.stop if row.sampling else ()
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(row.text)), longest, -1):
            if row.text.endswith(stop[:size]):
                longest = size
                break
    return longest


def _finite(value: float | None) -> float | None:
    return LEAST if value == -inf else value
