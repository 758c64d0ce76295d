"""One turn of a batch, whatever its status: the first to the last line of its life."""

from collections.abc import Sequence

from msgspec.structs import replace
from redis.asyncio.client import Pipeline

from scorepool import store, wire
from scorepool.api.batches.batch_lease import BatchLease
from scorepool.api.batches.batch_store import BatchStore, file_id
from scorepool.api.batches.check import check
from scorepool.api.batches.collect import collect, stop, write_off
from scorepool.api.batches.lines import Ending
from scorepool.api.batches.take import resubmit, take
from scorepool.api.dialects.openai.batch import BatchError, BatchErrors, RequestCounts
from scorepool.api.dialects.openai.files import FILE_KEPT_S
from scorepool.api.repositories.files import publish
from scorepool.api.state import State
from scorepool.store.job_hash import iso_now
from scorepool.store.scripts import load

MOVED_S, STILL_S = 0.05, 0.5  # until the next turn
ANNOUNCE = store.OUTBOX + load("announce_batch.lua")


async def run(parts: State, turn: BatchLease) -> float:
    """Returns the seconds until the next turn. Raises LeaseLost."""
    match turn.batch.status:
        case "validating":
            await _validate(parts, turn)
            return 0.0
        case "finalizing":
            await _finish(turn, "completed")
            return 0.0
    ledger, ending = BatchStore(parts, turn), _ending(turn)
    if ending is not None:
        await stop(ledger)
    has_moved = await collect(ledger, ending)
    if ending is not None:
        await write_off(ledger, ending)
    if ending is not None or await resubmit(ledger):
        has_moved |= await take(ledger, ending)
    if turn.progress.is_read and not await ledger.held():
        await _end(turn, ending)
        return 0.0
    return MOVED_S if has_moved else STILL_S


def _ending(turn: BatchLease) -> Ending | None:
    if turn.cancel_at is not None:
        return "cancelled"
    return "expired" if turn.now >= turn.batch.expires_at else None


async def _validate(parts: State, turn: BatchLease) -> None:
    if turn.cancel_at is not None:
        await _finish(turn, "cancelled")
        return
    checked = await check(parts, turn)
    if checked.errors:
        await _finish(turn, "failed", checked.errors)
        return
    batch = replace(
        turn.batch,
        status="in_progress",
        in_progress_at=int(turn.now),
        model=checked.model,
        request_counts=RequestCounts(total=checked.num_lines),
    )
    await turn.commit(replace(turn.progress, batch=batch))


async def _end(turn: BatchLease, ending: Ending | None) -> None:
    """Every line has its entry, unless the input file went away under the batch."""
    total, num_taken = turn.batch.request_counts.total, turn.progress.num_taken
    if num_taken != total:
        message = f"the input file ended after {num_taken} of {total} lines: it was removed"
        await _finish(turn, "failed", [BatchError(code="input_file_gone", message=message)])
    elif ending is not None:
        await _finish(turn, ending)
    else:
        batch = replace(turn.batch, status="finalizing", finalizing_at=int(turn.now))
        await turn.commit(replace(turn.progress, batch=batch))


async def _finish(turn: BatchLease, status: wire.BatchEnd, errors: Sequence[BatchError] = ()) -> None:
    """Its files, its end and the news of it, in one transaction. Raises LeaseLost."""
    progress, owner, id_ = turn.progress, turn.owner, turn.id
    output, error = file_id(id_, "output"), file_id(id_, "error")
    batch = replace(
        progress.batch,
        status=status,
        cancelling_at=None if turn.cancel_at is None else int(turn.cancel_at),
        errors=BatchErrors(data=list(errors)) if errors else None,
        output_file_id=output if progress.output_parts else None,
        error_file_id=error if progress.error_parts else None,
        **{f"{status}_at": int(turn.now)},
    )
    terms = (id_, owner, f"batch.{status}", iso_now(), FILE_KEPT_S)

    def write(pipeline: Pipeline) -> None:
        kept_s = progress.output_ttl_s
        if progress.output_parts:
            publish(pipeline, owner, output, f"{id_}_output.jsonl", "batch_output", progress.output_bytes, kept_s)
        if progress.error_parts:
            publish(pipeline, owner, error, f"{id_}_error.jsonl", "batch_output", progress.error_bytes, kept_s)
        pipeline.hdel(store.Keys.file(batch.input_file_id), f"batch:{id_}")
        pipeline.unlink(store.Keys.batch_lines(id_))
        pipeline.zrem(store.Keys.batches, id_)
        pipeline.expire(store.Keys.batch(id_), FILE_KEPT_S)
        pipeline.eval(ANNOUNCE, 0, *terms)

    await turn.commit(replace(progress, batch=batch), write)
