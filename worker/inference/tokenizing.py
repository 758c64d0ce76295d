"""Tokenize jobs in turns, so that long texts of one owner hold up nobody else.

A job is tokenized in slices: texts of at most SLICE_CHARACTERS together, or one longer text. Between two slices the
next owner has its turn (owner_turns.py). A single text cannot be interrupted, so those that are longer have a thread of
their own; the tokenizer releases the GIL.

    put ──► short texts ──► thread ──┐
       └──► long texts ───► thread ──┴──► job.advance ──► put, while the job has texts left
"""

from collections import Counter
from functools import partial
from threading import Lock
from typing import Protocol

from scorepool.worker.inference.owner_turns import OwnerThread

SLICE_CHARACTERS = 32_768  # of a turn with short texts: about 0.05 s
MAX_WAITING_CHARACTERS = 4 * SLICE_CHARACTERS  # of an owner, up to which its jobs are claimed


class TokenizedJob(Protocol):
    owner: str
    num_characters: int  # of all its texts

    def advance(self, max_characters: int) -> int | None:
        """Encode the text whose length the last call returned, and more: at most `max_characters` of them.

        Return the length of the text that comes next; None if there is none. Raises nothing.
        """


class TokenizingQueue:
    """Jobs that wait for the tokenizer or are tokenized. Any thread may call it."""

    def __init__(self) -> None:
        self.short, self.long = OwnerThread("tokenize"), OwnerThread("tokenize_long")
        self._lock = Lock()  # guards the counts
        self._num_characters: Counter[str] = Counter()  # of the jobs that are not done, by owner

    @property
    def since(self) -> float | None:
        """The start of the turn that has run longest, time.monotonic(); None if none runs."""
        running = (self.short.since, self.long.since)
        return min((since for since in running if since is not None), default=None)

    @property
    def crowded_owners(self) -> frozenset[str]:
        """The owners of which so much text waits that another worker should get their next jobs."""
        with self._lock:
            return frozenset(owner for owner, num in self._num_characters.items() if num > MAX_WAITING_CHARACTERS)

    def put(self, job: TokenizedJob) -> None:
        with self._lock:
            self._num_characters[job.owner] += job.num_characters
        self._put(job, 0)

    def close(self) -> None:
        """Drop the jobs that wait. Does not wait for the texts that are being encoded."""
        self.short.close()
        self.long.close()

    def _put(self, job: TokenizedJob, num_characters: int) -> None:
        thread = self.short if num_characters <= SLICE_CHARACTERS else self.long
        thread.submit(job.owner, partial(self._advance, job))

    def _advance(self, job: TokenizedJob) -> None:
        num_characters = job.advance(SLICE_CHARACTERS)
        if num_characters is not None:
            self._put(job, num_characters)
            return
        with self._lock:
            self._num_characters[job.owner] -= job.num_characters
            if not self._num_characters[job.owner]:
                del self._num_characters[job.owner]
