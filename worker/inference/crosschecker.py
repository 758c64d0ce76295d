"""Compare score results with those of other workers of the same model (SCOREPOOL_CROSSCHECK).

A check goes from worker to worker. Each computes the job and adds its computation:

    first ──► second                     they agree, or differ by more than the tolerance
                └──► third               agrees with one of them; the other one
                       └──► computes it again, and stops claiming jobs if it differs from both once more

So a worker is stopped by itself only, and only while two others that agree with each other take jobs: one bad machine
cannot stop a fleet. Where no third worker can decide, the difference is reported and nobody stops.

The log names the job and the first token that differs. The status does not: `GET /v1/models` shows it to every API key.

The checks run on a thread of their own beside the jobs, one at a time, in portions of about one step of the engine.
They begin when the job's result is recorded, and a check that is lost is not repeated.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from threading import Event, Thread

from msgspec.structs import replace
from redis.exceptions import RedisError

from scorepool.engine import Engine, EngineClosed, EngineDeadError, EngineError, NonFiniteLogits, Sequence
from scorepool.wire import (
    Computation,
    Crosscheck,
    CrosscheckNotice,
    CrosscheckStatus,
    Floats,
    Result,
    are_of_one_model,
)
from scorepool.worker.inference.columns import clamp_logprob
from scorepool.worker.inference.crosscheck_mail import CrosscheckMail, is_chosen
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.provenance import provenance_of
from scorepool.worker.rq.job import Job

POLL_S = 1.0
RETRY_S = 10.0  # after an error
MAX_OFFERED = 256  # checks that wait to be sent in this process; the oldest are dropped
MAX_TOKENS = 2**17  # of all sequences of a job; a longer one is not checked
JOIN_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class Crosschecker:
    """The checks of one worker: those of its own jobs, and those that others send it."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        mail: CrosscheckMail,
        share: float,
        max_batch_tokens: int,
        show: Callable[[CrosscheckStatus], None],
        stop_claiming: Callable[[str], None],
        fail: Callable[[EngineDeadError], None],
    ) -> None:
        """`show`, `stop_claiming` and `fail` are called on the thread of the checks."""
        self.status = CrosscheckStatus(share=share)
        self._engine = engine
        self._model = model
        self._mail = mail
        self._max_batch_tokens = max_batch_tokens
        self._show = show
        self._stop_claiming = stop_claiming
        self._fail = fail
        self._offered: deque[Callable[[], None]] = deque(maxlen=MAX_OFFERED)  # calls that send
        self._ended = Event()
        self._thread = Thread(target=self._run, name="crosschecks", daemon=True)

    def start(self) -> None:
        """Show the status and begin to check. Messages to an earlier worker of this name are dropped.

        Call it before the worker is registered: nobody sends messages before that. Raises RedisError.
        """
        self._mail.clear()
        self._show(self.status)
        self._thread.start()

    def close(self) -> None:
        """End after the running check. Close the engine first, so that it does not wait for it."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def offer(self, job: Job, prepared: list[PreparedSequence], temperature: float, result: Result) -> None:
        """Have a score job checked once its result is recorded, if it belongs to the share. Runs on the main thread."""
        if not is_chosen(job.id, self.status.share):
            return
        prepared = [each for each in prepared if each.failure is None]
        token_ids = [each.sequence.token_ids for each in prepared]
        if not token_ids or sum(map(len, token_ids)) > MAX_TOKENS:
            return
        first = [each.sequence.score_from or 0 for each in prepared]
        logprobs = [
            sequence.logprobs or Floats() for sequence in result.unpacked().sequences if sequence.failure is None
        ]
        mine = Computation(worker=self._mail.worker, stamp=result.stamp, logprobs=logprobs)
        scope = prepared[0].sequence.prefix_scope  # of all sequences of the job
        job.on_recorded = partial(
            self._offered.append, partial(self._send, job.id, temperature, token_ids, first, mine, scope)
        )

    def show_stopped(self, reason: str) -> None:
        """Show that the worker claims no more jobs, and check no more. Any thread may call it."""
        self.status = replace(self.status, stopped=reason)
        self._show(self.status)
        self._ended.set()

    # On the thread of the checks.

    def _run(self) -> None:
        wait_s = 0.0
        while not self._ended.wait(wait_s):
            try:
                while self._offered:
                    send = self._offered.popleft()
                    send()
                wait_s = 0.0 if self._receive() else POLL_S
            except EngineClosed:
                return
            except EngineDeadError as error:
                self._fail(error)
                return
            except RedisError as error:
                log.warning("crosschecks wait for Redis: %s", error)
                wait_s = RETRY_S
            except Exception:
                log.exception("a crosscheck failed")
                wait_s = RETRY_S

    def _send(
        self,
        job_id: str,
        temperature: float,
        token_ids: list[list[int]],
        first: list[int],
        mine: Computation,
        prefix_scope: str | None,
    ) -> None:
        """Send a job of this worker to a second one."""
        check = Crosscheck(
            job_id=job_id,
            temperature=temperature,
            token_ids=token_ids,
            first=first,
            computations=[mine],
            prefix_scope=prefix_scope,
        )
        self._mail.send_to_another(check, mine.stamp)

    def _receive(self) -> bool:
        """Handle the next message; return whether there was one."""
        message = self._mail.receive()
        match message:
            case None:
                return False
            case CrosscheckNotice(difference=difference):
                self._show_difference(difference)
            case Crosscheck():
                self._check(message)
        return True

    def _check(self, check: Crosscheck) -> None:
        mine = self._compute(check)
        if mine is None or not all(are_of_one_model(mine.stamp, one.stamp) for one in check.computations):
            return  # the weights of a worker have changed since
        match check.computations:
            case [first]:
                self._confirm(check, first, mine)
            case [first, second]:
                self._decide(check, first, second, mine)
            case _:
                self._repeat(check, mine)

    def _confirm(self, check: Crosscheck, first: Computation, mine: Computation) -> None:
        """Compare the result of the job with a second computation."""
        found = check.compare(first, mine)
        if found.first is None:
            self._mail.count("agreed")
            return
        text = f"workers {first.worker} and {mine.worker} differ by up to {found.largest:.3g} nats"
        log.error("crosscheck of job %s: %s, first at %s", check.job_id, text, found.first)
        self._mail.count("differed")
        both = replace(check, computations=[first, mine])
        if third := self._mail.send_to_another(both, mine.stamp):
            log.error("crosscheck of job %s: worker %s decides which of them is wrong", check.job_id, third)
        else:
            self._report(check, f"{text}; no third worker can decide which of them is wrong", [first, mine])

    def _decide(self, check: Crosscheck, first: Computation, second: Computation, mine: Computation) -> None:
        """Find which of two computations is wrong: that which the third does not confirm."""
        all_three = [first, second, mine]
        wrong = [one for one in (first, second) if check.compare(one, mine).first is not None]
        if len(wrong) != 1:
            names = ", ".join(one.worker for one in all_three)
            self._report(check, f"no two of the workers {names} outvote the third", all_three)
            return
        [right] = [one for one in (first, second) if one is not wrong[0]]
        text = "crosscheck of job %s: worker %s differs from %s and %s, which agree; it computes the job again"
        log.error(text, check.job_id, wrong[0].worker, right.worker, mine.worker)
        self._mail.send(wrong[0].worker, replace(check, computations=[wrong[0], right, mine]))

    def _repeat(self, check: Crosscheck, mine: Computation) -> None:
        """Stop claiming jobs if this worker again differs from the two that agree."""
        wrong, *right = check.computations
        if wrong.worker != mine.worker:
            return
        names = " and ".join(one.worker for one in right)
        text = f"worker {mine.worker} differed from {names}, which agree,"
        found = [check.compare(one, mine) for one in right]
        if not all(each.first for each in found):
            self._report(check, f"{text} and agreed when it computed the job again", [])
            return
        text = f"{text} and differed again, by up to {found[0].largest:.3g} nats"
        log.error("crosscheck of job %s: %s, first at %s", check.job_id, text, found[0].first)
        if not self._mail.others({mine.worker}, mine.stamp).issuperset(one.worker for one in right):
            self._report(check, f"{text}; not both of them take jobs any more", [])
            return
        self._stop_claiming(text)  # before it is shown: whoever sees the reason gets no more from this worker
        self.show_stopped(text)
        self._mail.count("stopped")

    def _report(self, check: Crosscheck, difference: str, workers: list[Computation]) -> None:
        """Log a difference that stops nobody, and have every worker that took part show it."""
        log.error("crosscheck of job %s: %s; all go on", check.job_id, difference)
        self._show_difference(difference)
        for one in workers:
            if one.worker != self._mail.worker:
                self._mail.send(one.worker, CrosscheckNotice(difference=difference))

    def _show_difference(self, difference: str) -> None:
        self.status = replace(self.status, difference=difference)
        self._show(self.status)

    def _compute(self, check: Crosscheck) -> Computation | None:
        """Compute the job; None if this worker cannot. Raises EngineClosed, EngineDeadError."""
        logprobs: list[Floats] = []
        infos = []
        for portion in self._portions(check):
            try:
                self._engine.add(portion).result()
            except NonFiniteLogits:  # differs from every number
                logprobs += [Floats([None] * (len(one.token_ids) - (one.score_from or 0))) for one in portion]
            except (EngineClosed, EngineDeadError):
                raise
            except EngineError as error:  # it is too long for this worker
                log.info("crosscheck of job %s is not computed: %s", check.job_id, error)
                return None
            else:
                logprobs += [Floats(map(clamp_logprob, one.columns.logprobs)) for one in portion]
            infos.append(portion[-1].model_info or self._engine.model_info)
        if len({info.fingerprint for info in infos}) > 1:
            return None
        stamp = provenance_of(self._model, infos[-1])
        return Computation(worker=self._mail.worker, stamp=stamp, logprobs=logprobs)

    def _portions(self, check: Crosscheck) -> Iterator[list[Sequence]]:
        """Yield the sequences in portions of about one step, so that jobs beside them wait for no more than that."""
        portion: list[Sequence] = []
        num_tokens = 0
        for token_ids, first in zip(check.token_ids, check.first, strict=True):
            if portion and num_tokens + len(token_ids) > self._max_batch_tokens:
                yield portion
                portion, num_tokens = [], 0
            portion.append(
                Sequence(
                    token_ids=list(token_ids),
                    score_from=first,
                    temperature=check.temperature,
                    prefix_scope=check.prefix_scope,
                )
            )
            num_tokens += len(token_ids)
        yield portion
