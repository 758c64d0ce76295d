"""`scorepool jobs`, `job` and `cancel`. Each returns an exit status or raises CommandError."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice

from scorepool import wire
from scorepool.commands.connecting import UNKNOWN, aligned, connect, print_json
from scorepool.commands.running import FAILED
from scorepool.sdk import BatchTimeout, Client, ScorepoolError

BATCH = "batch_"  # with which the ids of batches begin
MAX_SHOWN = 10  # sequences of a result
TEXT_SHOWN = 60  # characters of a sequence
OF_ONE_JOB = (404, 409)  # statuses of refusals that say nothing about other jobs


def list_jobs(
    url: str,
    api_key: str | None,
    *,
    status: wire.Status | None,
    model: str | None,
    kind: wire.Kind | None,
    cursor: str | None,
    limit: int,
    as_json: bool,
) -> int:
    """Print a page of jobs, newest first."""
    with connect(url, api_key) as client:
        page = client.jobs(status=status, model=model, kind=kind, cursor=cursor, limit=limit)
    if as_json:
        print_json(page)
        return 0
    if not page.jobs:
        print("no jobs")  # noqa: T201
        return 0
    rows = [
        (job.id, job.kind or "?", job.model, job.status, _age(job.created_at), _duration(job.started_at, job.ended_at))
        for job in page.jobs
    ]
    print(aligned([("ID", "KIND", "MODEL", "STATUS", "AGE", "TOOK"), *rows]))  # noqa: T201
    if page.next_cursor:
        print(f"older ones: --cursor {page.next_cursor}")  # noqa: T201
    return 0


def show_job(url: str, api_key: str | None, job_id: str, *, wait_s: float, as_json: bool) -> int:
    """Print a job, with its result or its failure; or a batch, by its id."""
    with connect(url, api_key) as client:
        found = _batch(client, job_id, wait_s) if job_id.startswith(BATCH) else client.job(job_id, wait_s=wait_s)
    if as_json:
        print_json(found)
    else:
        print("\n".join(_describe_batch(found) if isinstance(found, wire.Batch) else _describe(found)))  # noqa: T201
    return 0


def _batch(client: Client, batch_id: str, wait_s: float) -> wire.Batch:
    with suppress(BatchTimeout):
        return client.wait_for_batch(batch_id, timeout_s=wait_s)
    return client.batch(batch_id)


def cancel(url: str, api_key: str | None, job_ids: Sequence[str], *, as_json: bool) -> int:
    """Cancel jobs and batches, and print a line for each. The exit status is FAILED if one of them was not canceled."""
    num_canceled = 0
    with connect(url, api_key) as client:
        for job_id in job_ids:
            outcome: dict[str, object] = {"id": job_id, "canceled": True, "status": None, "error": None}
            try:
                cancel = client.cancel_batch if job_id.startswith(BATCH) else client.cancel
                outcome["status"] = cancel(job_id).status
                num_canceled += 1
            except ScorepoolError as error:
                if error.status not in OF_ONE_JOB or error.code == UNKNOWN:
                    raise
                outcome |= {"canceled": False, "error": error.message}
            if as_json:
                print_json(outcome)
            else:
                print(_describe_outcome(outcome))  # noqa: T201
    return 0 if num_canceled == len(job_ids) else FAILED


def _describe_outcome(outcome: Mapping[str, object]) -> str:
    if outcome["error"] is not None:
        return f"{outcome['id']}: not canceled: {outcome['error']}"
    stops = {"started": ", its worker stops it", "cancelling": ", lines that run are stopped"}
    return f"{outcome['id']}: canceled{stops.get(str(outcome['status']), '')}"


def _describe_batch(batch: wire.Batch) -> list[str]:
    counts = batch.request_counts
    lines = f"{counts.completed} completed and {counts.failed} failed of {counts.total}"
    fields = [("id", batch.id), ("kind", "batch"), ("model", batch.model or "several"), ("status", batch.status)]
    fields += [("lines", lines), ("created", f"{_iso(batch.created_at)} ({_age(batch.created_at)} ago)")]
    if batch.estimated_end_at is not None:
        fields.append(("ends about", _iso(batch.estimated_end_at)))
    files = (("input", batch.input_file_id), ("output", batch.output_file_id), ("errors", batch.error_file_id))
    fields += [(f"{name} file", file_id) for name, file_id in files if file_id is not None]
    errors = batch.errors.data if batch.errors else []
    fields += [("error", f"line {error.line}: {error.message}" if error.line else error.message) for error in errors]
    return [aligned(fields)]


def _describe(job: wire.Job) -> list[str]:
    fields = [("id", job.id), ("kind", job.kind or "?"), ("model", job.model), ("status", job.status)]
    times = (("created", job.created_at), ("started", job.started_at), ("ended", job.ended_at))
    fields += [(name, f"{_iso(at)} ({_age(at)} ago)") for name, at in times if at is not None]
    if job.failure is not None:
        fields += [("failure", f"{job.failure.code}: {job.failure.message}")]
    if job.result is not None:
        fields += [("computed by", f"{job.result.stamp.model}, {job.result.stamp.dtype}, {job.result.stamp.mode}")]
    lines = [aligned(fields)]
    if job.result is not None and job.result.sequences:
        lines += ["", *_describe_sequences(job.result.unpacked().sequences)]
    if job.result is not None and job.result.classifications:
        lines += ["", *_describe_classifications(job.result)]
    return lines


def _describe_classifications(result: wire.Result) -> list[str]:
    rows = [("ITEM", "TOKENS", "LABEL", "LOGITS")]
    for index, one in enumerate(result.classifications[:MAX_SHOWN]):
        if one.failure is not None:
            rows.append((str(index), "0", "-", one.failure.message))
            continue
        named = (f"{name} {logit:.4f}" for name, logit in zip(result.labels, one.logits, strict=True))
        rows.append((str(index), str(one.num_tokens), one.label, ", ".join(islice(named, MAX_SHOWN))))
    rest = len(result.classifications) - MAX_SHOWN
    return [aligned(rows), *([f"and {rest} more: --json shows all"] if rest > 0 else [])]


def _describe_sequences(sequences: Sequence[wire.SequenceResult]) -> list[str]:
    rows = [("SEQUENCE", "TOKENS", "LOGPROB", "TEXT")]
    for index, sequence in enumerate(sequences[:MAX_SHOWN]):
        if sequence.failure is not None:
            rows.append((str(index), "0", "-", sequence.failure.message))
            continue
        logprob = "-" if sequence.logprob_sum is None else f"{sequence.logprob_sum:.4f}"
        text = b"".join(sequence.token_bytes).decode(errors="replace") if sequence.text is None else sequence.text
        shown = repr(text if len(text) <= TEXT_SHOWN else text[: TEXT_SHOWN - 3] + "...")
        rows.append((str(index), str(len(sequence.token_ids)), logprob, shown))
    rest = len(sequences) - MAX_SHOWN
    return [aligned(rows), *([f"and {rest} more: --json shows all"] if rest > 0 else [])]


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def _age(at: float | None) -> str:
    return "?" if at is None else duration(time.time() - at)


def _duration(started_at: float | None, ended_at: float | None) -> str:
    return "-" if started_at is None or ended_at is None else duration(ended_at - started_at)


def duration(seconds: float) -> str:
    """Return a time for people: `0.25 s`, `42 s`, `3 min`, `5 h`, `2 d`."""
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{max(0.0, seconds):.2g} s"
