"""`scorepool verify`: compute the logprobs of results again and compare them.

A job's request is gone when it has ended, but a result holds what its logprobs are about. Its tokens are scored once
more as given tokens, on the server or on another machine, whatever kind of job made them.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from math import ceil, isnan
from pathlib import Path
from typing import Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from scorepool import wire
from scorepool.sdk import Client, InvalidUrl, JobFailed, NotScorepool, ScorepoolError, Unreachable
from scorepool.wire import Floats, ScoredSequence
from scorepool.wire.request_fields import FORMS, MAX_TOP_K, WHOLE_VOCABULARY
from scorepool.wire.submission import MAX_TIMEOUT_S

Recompute = Callable[[wire.Score], wire.Result]
EXIT_STATUS = {"equal": 0, "within": 0, "different": 1, "unknown": 2}
CANNOT_TELL = EXIT_STATUS["unknown"]
RETRY_S = 10.0  # a command's user waits
# Fields of a generate job that change the distribution it samples from, beside the temperature.
CHANGE_THE_DISTRIBUTION = (
    *("top_p", "top_k", "min_p", "min_tokens", "logit_bias", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "allowed_token_ids", "bad_words", *FORMS, "tools"),
)
T = TypeVar("T")


class CannotTell(Exception):
    """A result that cannot be verified. The message says what is missing."""


class Verdict(Struct, frozen=True):
    """What computing a result again has shown, and the sentence for it."""

    kind: Literal["equal", "within", "different", "unknown"]
    sentence: str


Report = Callable[[str, Verdict], None]


def print_line(job_id: str, verdict: Verdict) -> None:
    """Print a verdict for people."""
    print(f"{job_id}: {verdict.sentence}", flush=True)  # noqa: T201


def print_json(job_id: str, verdict: Verdict) -> None:
    """Print a verdict as a line of JSON."""
    line = {"id": job_id, "verdict": verdict.kind, "sentence": verdict.sentence}
    print(wire.encode_json(line).decode(), flush=True)  # noqa: T201


def run_on_server(
    job_ids: Sequence[str],
    url: str,
    api_key: str | None,
    request_path: Path | None,
    timeout_s: float,
    report: Report,
) -> int:
    """Verify jobs by the workers of the API that holds their results; return the exit status. Raises CannotTell."""
    with connect(url, api_key) as client:
        recompute = on_server(client, timeout_s)
        return run(job_ids, client, lambda job: recompute, request_path, report)


def connect(url: str, api_key: str | None) -> Client:
    """Return a client. Raises CannotTell."""
    logging.getLogger("scorepool").addHandler(logging.NullHandler())  # the client's lines; verdicts say what failed
    try:
        return Client(url, api_key, retry_s=RETRY_S)
    except InvalidUrl as error:
        raise CannotTell(str(error)) from None


def run(
    job_ids: Sequence[str],
    client: Client,
    recompute_of: Callable[[wire.Job], Recompute],
    request_path: Path | None,
    report: Report,
) -> int:
    """Verify jobs and report each verdict; return the exit status: 0 confirmed, 1 different, 2 cannot tell.

    `recompute_of` returns what computes a job again. `request_path` is a file with the request of the only job.
    """
    kinds = set()
    for job_id in job_ids:
        try:
            request = None if request_path is None else _read_request(request_path, len(job_ids))
            job = _fetch(client, job_id)
            verdict = verify(job, recompute_of(job), request)
        except CannotTell as error:
            verdict = Verdict("unknown", f"cannot tell: {error}")
        report(job_id, verdict)
        kinds.add(verdict.kind)
    return next(EXIT_STATUS[kind] for kind in ("different", "unknown", "within", "equal") if kind in kinds)


def _read_request(path: Path, num_jobs: int) -> wire.Request:
    if num_jobs > 1:
        raise CannotTell("--request belongs to one JOB")
    try:
        return wire.parse(path.read_bytes(), wire.Request)  # type: ignore[arg-type]
    except (OSError, wire.Invalid) as error:
        raise CannotTell(f"--request {path}: {error}") from None


def on_server(client: Client, timeout_s: float) -> Recompute:
    """Return what submits a request to the server, waits for its result and deletes the job there."""
    job_timeout_s = ceil(min(max(1, timeout_s), MAX_TIMEOUT_S))

    def recompute(request: wire.Score) -> wire.Result:
        job = client.submit(replace(request, timeout_s=job_timeout_s))
        try:
            return job.result(timeout_s)
        finally:
            for forget in (job.cancel, job.delete):  # each is refused in states where it is not needed
                with suppress(ScorepoolError, Unreachable):
                    forget()

    return recompute


def verify(job: wire.Job, recompute: Recompute, request: wire.Request | None = None) -> Verdict:
    """Compute the job's logprobs again and compare them. Raises CannotTell."""
    result = _result_of(job).unpacked()
    if salt := getattr(request, "cache_salt", None):
        recompute = _with_salt(recompute, salt)
    if unpredicted := _unpredicted_with_logprob(result):
        return Verdict("different", f"different at {unpredicted}: no token comes before it, so it has no logprob")
    claimed = [_claimed(index, sequence, request) for index, sequence in enumerate(result.sequences)]
    is_processed = job.kind == "generate" and result.logprobs_mode == "processed_logprobs"
    temperature = result.temperature if is_processed or job.kind in ("score", "compare") else 1.0
    again, stamp = _rescore(job, claimed, temperature, recompute)
    stamps = wire.stamp_differences(result.stamp, stamp)
    if not wire.are_of_one_model(result.stamp, stamp):
        raise CannotTell(f"this model did not compute it: {'; '.join(stamps)}")
    notes = [f"the stamps differ: {'; '.join(stamps)}"] if stamps else []
    if any(sequence.target_logprobs is not None for sequence in result.sequences):
        notes.append("target_logprobs are not verified: a result does not hold the ids of its targets")
    # No mode promises bits of processed logprobs: sampling divides the logits elsewhere than scoring does.
    tolerance_of = wire.rounding_nats if is_processed else wire.tolerance_nats
    found = _compare(claimed, again, tolerance_of(result.stamp, stamp, temperature))
    if found.first is not None and is_processed and not _depends_on_temperature_alone(found.first, result, request):
        reason = (
            "filters or penalties, which a result does not hold, may apply: give the request with --request FILE"
            if request is None
            else "its request has filters or penalties, which a score job does not have"
        )
        raise CannotTell(f"its logprobs are processed, and {reason}")
    if found.first is None and any(sequence.sampled_logprobs is not None for sequence in result.sequences):
        sampled = _compare_sampled(job, result, claimed, recompute)
        if sampled.first is None or result.temperature == 0 or _samples_by_temperature_alone(request):
            found = _merge(found, sampled)
        else:
            notes.append(
                "sampled_logprobs are not verified: filters or penalties, which a result does not hold, may apply"
            )
    return Verdict(*_describe(found, result.stamp, notes))


def _with_salt(recompute: Recompute, salt: str) -> Recompute:
    """Return what computes under a cache salt, so that nobody without it shares the prompts that it reads."""
    return lambda request: recompute(replace(request, cache_salt=salt))


@contextmanager
def _explained() -> Iterator[None]:
    """Turn the errors of a client into CannotTell."""
    try:
        yield
    except JobFailed as error:
        raise CannotTell(f"it cannot be computed again: {error.failure.message}") from None
    except ScorepoolError as error:
        raise CannotTell(f"the server refuses: {error.message}") from None
    except TimeoutError as error:
        raise CannotTell(f"it was not computed again in time: {error}") from None
    except Unreachable as error:
        raise CannotTell(f"the API does not answer: {error}") from None
    except NotScorepool as error:
        raise CannotTell(str(error)) from None


def _fetch(client: Client, job_id: str) -> wire.Job:
    with _explained():
        return client.job(job_id)


def _result_of(job: wire.Job) -> wire.Result:
    if job.failure is not None:
        raise CannotTell(f"the job has no result but a failure, {job.failure.code}: {job.failure.message}")
    if job.result is None:
        raise CannotTell(f"the job is {job.status}; verify it when it has ended")
    if job.kind in ("tokenize", "classify", "embed"):
        raise CannotTell(f"a {job.kind} job computes no logprobs")
    if job.result.usage.images:
        raise CannotTell("its prompts show images, which a result does not hold")
    if job.result.stamp.approximate is not None:
        raise CannotTell(f"its numbers are not the model's for the whole prompt: {job.result.stamp.approximate}")
    return job.result


def _unpredicted_with_logprob(result: wire.Result) -> wire.TokenDifference | None:
    """Return a first token of a sequence that has a logprob, which must be null."""
    for index, sequence in enumerate(result.sequences):
        if sequence.logprobs and _first_reported(sequence) == 0 and not isnan(sequence.logprobs[0]):
            return wire.TokenDifference(
                sequence=index,
                position=0,
                token_id=sequence.token_ids[0],
                column="logprob",
                one=sequence.logprobs[0],
                other=None,
            )
    return None


def _first_reported(sequence: wire.SequenceResult) -> int:
    """Return the position of the first token that has an entry."""
    return sequence.num_prompt_tokens - sequence.num_reported_prompt_tokens


def _claimed(index: int, sequence: wire.SequenceResult, request: wire.Request | None) -> ScoredSequence:
    """Return what a sequence claims, without the entry of a token that no token comes before. Raises CannotTell.

    An item that failed claims nothing.
    """
    if sequence.failure:
        return ScoredSequence(token_ids=[], first=0, logprobs=Floats())
    if sequence.logprobs is None:
        raise CannotTell("the result has no logprobs, because its request said logprobs: false")
    first = _first_reported(sequence)
    prompt = _prompt_ids(index, sequence, request)[:first] if first else []
    skipped = 0 if first else 1
    return ScoredSequence(
        token_ids=[*prompt, *sequence.token_ids],
        first=first + skipped,
        logprobs=Floats(sequence.logprobs[skipped:]),
        top_ids=_from(skipped, sequence.top_ids),
        top_logprobs=_from(skipped, sequence.top_logprobs),
        ranks=_from(skipped, sequence.ranks),
        entropies=None if sequence.entropies is None else Floats(sequence.entropies[skipped:]),
    )


def _from(start: int, column: list[T] | None) -> list[T] | None:
    return None if column is None else column[start:]


def _prompt_ids(index: int, sequence: wire.SequenceResult, request: wire.Request | None) -> list[int]:
    if sequence.prompt_token_ids is not None:
        return sequence.prompt_token_ids
    if request is None:
        raise CannotTell(
            "the prompt's token ids are missing, because the request gave them and the result does not repeat them: "
            "give the request with --request FILE"
        )
    if isinstance(request, wire.Score):
        prompt, _ = next(islice(request.pairs(), index, None), (None, None))
    else:
        prompt = None if isinstance(request, wire.Classify | wire.Embed) else request.prompt
    if not isinstance(prompt, list) or len(prompt) != sequence.num_prompt_tokens:
        raise CannotTell(
            f"--request is of another job: the prompt of sequence {index} has {sequence.num_prompt_tokens} token ids"
        )
    return prompt


def _rescore(
    job: wire.Job, claimed: Sequence[ScoredSequence], temperature: float, recompute: Recompute
) -> tuple[list[ScoredSequence], wire.Provenance]:
    """Score the tokens of sequences again, with the same columns, by the adapter of the job. Raises CannotTell."""
    assert job.result is not None
    scored = [sequence for sequence in claimed if sequence.logprobs]
    if not scored:
        raise CannotTell("the result reports no token that has a logprob")
    columns = scored[0]
    label = job.result.stamp.adapter  # its name, and a part of its fingerprint
    request = wire.Score(
        model=job.model,
        adapter=label and (label.rpartition("@")[0] or label),
        items=[
            wire.ScoreItem(prompt=sequence.token_ids[: sequence.first], completion=sequence.token_ids[sequence.first :])
            for sequence in scored
        ],
        temperature=temperature,
        top_logprobs=_num_top(columns),
        rank=columns.ranks is not None,
        cache=False,
        entropy=columns.entropies is not None,
    )
    with _explained():
        result = recompute(request)
    results = iter(result.sequences)
    again = [_again(sequence, next(results)) if sequence.logprobs else sequence for sequence in claimed]
    return again, result.stamp


def _num_top(columns: ScoredSequence) -> int:
    """Return how many of the most likely tokens to ask for; a result that has more than a job may name has all."""
    num_top = len(columns.top_ids[0]) if columns.top_ids else 0
    return num_top if num_top <= MAX_TOP_K else WHOLE_VOCABULARY


def _again(claimed: ScoredSequence, result: wire.SequenceResult) -> ScoredSequence:
    return ScoredSequence(
        token_ids=[*claimed.token_ids[: claimed.first], *result.token_ids],
        first=claimed.first,
        logprobs=result.logprobs or Floats(),
        top_ids=result.top_ids,
        top_logprobs=result.top_logprobs,
        ranks=result.ranks,
        entropies=result.entropies,
    )


def _compare_sampled(
    job: wire.Job, result: wire.Result, claimed: Sequence[ScoredSequence], recompute: Recompute
) -> wire.Comparison:
    """Compare `sampled_logprobs` with the model's own at the temperature of sampling; greedy ones are 0."""
    sampled = [
        ScoredSequence(
            token_ids=tokens.token_ids,
            first=sequence.num_prompt_tokens,
            logprobs=sequence.sampled_logprobs or Floats(),
        )
        for tokens, sequence in zip(claimed, result.sequences, strict=True)
    ]
    if result.temperature == 0:
        zeros = [replace(sequence, logprobs=Floats([0.0] * len(sequence.logprobs))) for sequence in sampled]
        return _compare(sampled, zeros, 0.0, "sampled_logprob")
    again, stamp = _rescore(job, sampled, result.temperature, recompute)
    # No mode promises bits here: sampling divides the logits by the temperature elsewhere than scoring does.
    tolerance = wire.rounding_nats(result.stamp, stamp, result.temperature)
    return _compare(sampled, again, tolerance, "sampled_logprob")


def _compare(
    claimed: Sequence[ScoredSequence], again: Sequence[ScoredSequence], tolerance: float, column: str = "logprob"
) -> wire.Comparison:
    try:
        found = wire.compare(claimed, again, tolerance)
    except ValueError as error:
        raise CannotTell(f"the server scored something else: {error}") from None
    if found.first is None or column == "logprob":
        return found
    return replace(found, first=replace(found.first, column=column))


def _samples_by_temperature_alone(request: wire.Request | None) -> bool:
    """True if the request is known, and nothing but its temperature changes the distribution that is sampled from."""
    if not isinstance(request, wire.Generate):
        return False
    plain = wire.Generate(model=request.model, prompt="")
    return all(getattr(request, name) == getattr(plain, name) for name in CHANGE_THE_DISTRIBUTION)


def _depends_on_temperature_alone(
    token: wire.TokenDifference, result: wire.Result, request: wire.Request | None
) -> bool:
    """True if nothing but the temperature changes the processed logprob of a token: filters spare the prompt."""
    is_of_prompt = token.position < result.sequences[token.sequence].num_prompt_tokens
    return is_of_prompt or _samples_by_temperature_alone(request)


def _merge(one: wire.Comparison, other: wire.Comparison) -> wire.Comparison:
    """Return both comparisons of the same tokens as one."""
    return replace(
        one,
        tolerance=max(one.tolerance, other.tolerance),
        num_different=max(one.num_different, other.num_different),
        largest=max(one.largest, other.largest),
        is_equal=one.is_equal and other.is_equal,
        first=one.first or other.first,
    )


def _describe(
    found: wire.Comparison, stamp: wire.Provenance, notes: Sequence[str]
) -> tuple[Literal["equal", "within", "different"], str]:
    """Return the kind of the verdict and its sentence."""
    kind: Literal["equal", "within", "different"]
    tokens = f"{found.num_tokens} token{'s' if found.num_tokens > 1 else ''}"
    if found.first is not None:
        kind = "different"
        text = (
            f"different at {found.first}; {found.num_different} of {tokens} differ by more than {found.tolerance:g} "
            f"nats, at most by {found.largest:.3g}"
        )
    elif found.is_equal:
        kind, text = "equal", f"equal to the bit, {tokens}"
    else:
        kind = "within"
        text = (
            f"within the tolerance of {found.tolerance:g} nats ({stamp.mode}, {stamp.dtype}), {tokens}, "
            f"the largest difference {found.largest:.3g}"
        )
    return kind, "; ".join([text, *notes])
