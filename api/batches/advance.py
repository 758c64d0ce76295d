"""Advance a batch by one step, whatever its status."""

from collections.abc import Sequence

from msgspec.structs import replace
from redis.asyncio.client import Pipeline

from scorepool import store, wire
from scorepool.api.batches.batch_lease import BatchLease
from scorepool.api.batches.batch_store import BatchStore, file_id_of, output_files
from scorepool.api.batches.collect import cancel_jobs, collect, fail_stuck_lines
from scorepool.api.batches.lines import Ending
from scorepool.api.batches.services import BatchServices
from scorepool.api.batches.start_lines import resubmit, start_lines
from scorepool.api.batches.validate import validate
from scorepool.api.repositories.files import publish_file
from scorepool.api.repositories.pages import add_to_list
from scorepool.store.scripts import load
from scorepool.wire.batch import BatchError, BatchErrors, RequestCounts
from scorepool.wire.file import FILE_KEPT_S

BUSY_S, IDLE_S = 0.05, 0.5  # until the batch is due again
VALIDATE_AGAIN_S = 10.0  # the same, of one that cannot be validated while a server does not answer
ANNOUNCE = load("announce_batch.lua")


async def advance(services: BatchServices, lease: BatchLease) -> float:
    """Do some work on the batch; return the seconds until it is due again. Raise LeaseLost."""
    match lease.batch.status:
        case "validating":
            return await _validate(services, lease)
        case "finalizing":
            await _finish(lease, "completed")
            return 0.0
    batch_store, ending = BatchStore(services.redis, lease, services.line_jobs), _ending(lease)
    if ending is not None:
        await cancel_jobs(services, batch_store)
    has_advanced = await collect(services, batch_store, ending)
    if ending is not None:
        await fail_stuck_lines(batch_store, ending)
    resubmitted = "all" if ending is not None else await resubmit(services, batch_store)
    if resubmitted == "some":
        return 0.0
    if resubmitted == "all":
        has_advanced |= await start_lines(services, batch_store, ending)
    if lease.progress.is_read and not await batch_store.in_progress():
        await _end(lease, ending)
        return 0.0
    return BUSY_S if has_advanced else IDLE_S


def _ending(lease: BatchLease) -> Ending | None:
    if lease.cancel_at is not None:
        return "cancelled"
    return "expired" if lease.now >= lease.batch.expires_at else None


async def _validate(services: BatchServices, lease: BatchLease) -> float:
    """Validate the input file; return the seconds until the batch is due again. Raise LeaseLost."""
    if lease.cancel_at is not None:
        await _finish(lease, "cancelled")
        return 0.0
    validation = await validate(services, lease)
    is_file_gone = validation.num_lines == 0
    if lease.now >= lease.batch.expires_at and (is_file_gone or not validation.is_complete):
        await _finish(lease, "expired")
        return 0.0
    if validation.errors:
        await _finish(lease, "failed", validation.errors)
        return 0.0
    if not validation.is_complete:
        return VALIDATE_AGAIN_S
    batch = replace(
        lease.batch,
        status="in_progress",
        in_progress_at=int(lease.now),
        model=validation.model,
        request_counts=RequestCounts(total=validation.num_lines),
    )
    await lease.commit(replace(lease.progress, batch=batch))
    return 0.0


async def _end(lease: BatchLease, ending: Ending | None) -> None:
    """End a batch whose lines have all ended. It has failed if its input file disappeared before all were read."""
    total, num_started = lease.batch.request_counts.total, lease.progress.num_started
    if num_started != total:
        message = f"the input file ended after {num_started} of {total} lines: it was removed"
        await _finish(lease, "failed", [BatchError(code="input_file_gone", message=message)])
    elif ending is not None:
        await _finish(lease, ending)
    else:
        batch = replace(lease.batch, status="finalizing", finalizing_at=int(lease.now))
        await lease.commit(replace(lease.progress, batch=batch))


async def _finish(lease: BatchLease, status: wire.BatchEnd, errors: Sequence[BatchError] = ()) -> None:
    """Publish the output files, the end of the batch and its webhook event in one transaction. Raise LeaseLost."""
    progress, owner, batch_id, now = lease.progress, lease.owner, lease.batch_id, lease.now
    batch = replace(
        progress.batch,
        status=status,
        cancelling_at=None if lease.cancel_at is None else int(lease.cancel_at),
        errors=BatchErrors(data=list(errors)) if errors else None,
        output_file_id=file_id_of(batch_id, "output") if progress.output_chunks else None,
        error_file_id=file_id_of(batch_id, "error") if progress.error_chunks else None,
        **{f"{status}_at": int(now)},
    )
    announcement = (batch_id, owner, f"batch.{status}", FILE_KEPT_S)

    def write(pipeline: Pipeline) -> None:
        for file in output_files(progress, now, "processed").values():
            publish_file(pipeline, owner, file, now)
        pipeline.hdel(store.Keys.file(batch.input_file_id), store.Keys.file_reader(batch_id))
        pipeline.unlink(store.Keys.batch_lines(batch_id))
        pipeline.zrem(store.Keys.batches, batch_id)
        pipeline.srem(store.Keys.live_batches_of(owner), batch_id)
        pipeline.expire(store.Keys.batch(batch_id), FILE_KEPT_S)
        add_to_list(pipeline, store.Keys.batches_of(owner), batch_id, batch.created_at, FILE_KEPT_S)
        pipeline.eval(ANNOUNCE, 0, *announcement)

    await lease.commit(replace(progress, batch=batch), write)
