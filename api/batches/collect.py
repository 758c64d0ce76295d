"""The ends of lines: results of their jobs, or why there are none."""

import asyncio

from scorepool import wire
from scorepool.api.batches import lines
from scorepool.api.batches.batch_store import BatchStore
from scorepool.api.batches.lines import Ended, Ending, LineInProgress
from scorepool.api.http.errors import NotFound
from scorepool.api.repositories.jobs import ENDED

GROUP = 16  # lines whose results are in memory at once
STOP_S = 60  # that jobs have to stop in when the batch is over


async def stop(ledger: BatchStore) -> None:
    """What waits ends at once; what runs is told to."""
    for one in await ledger.held():
        await ledger.parts.submission.cancel_all(ledger.turn.owner, one.job_ids(ledger.turn.id))


async def collect(ledger: BatchStore, ending: Ending | None) -> bool:
    """Write the entries of lines whose jobs have all ended. Returns whether there were any. Raises LeaseLost."""
    held = await ledger.held()
    statuses = await ledger.statuses(held)
    done = ENDED if ending is None else (*ENDED, None)  # what was not queued any more needs no end
    over = [one for one, found in zip(held, statuses, strict=True) if all(status in done for status in found)]
    for first in range(0, len(over), GROUP):
        group = over[first : first + GROUP]
        texts = await ledger.texts(group)
        found = await asyncio.gather(
            *(_ended(ledger, one, text, ending) for one, text in zip(group, texts, strict=True))
        )
        entries = {one: entry for one, entry in zip(group, found, strict=True) if entry is not None}
        await ledger.write(ledger.turn.progress, list(entries.values()), dropped=list(entries))
    return bool(over)


async def _ended(ledger: BatchStore, held: LineInProgress, text: bytes, ending: Ending | None) -> Ended | None:
    """None for one whose jobs were deleted just now: it is run again."""
    ids = held.job_ids(ledger.turn.id)
    try:
        jobs = await asyncio.gather(*(ledger.parts.jobs.read(ledger.turn.owner, id_) for id_ in ids))
        return lines.ended(text, ledger.batch, jobs, ending)
    except NotFound:
        return None if ending is None else lines.not_run(text, ending, ids[0])
    except wire.Invalid as error:
        return lines.refused(text, error, ids[0])


async def write_off(ledger: BatchStore, ending: Ending) -> None:
    """Lines whose jobs do not stop, STOP_S after the batch was over: their worker may be gone for good."""
    over_at = ledger.turn.cancel_at if ending == "cancelled" else ledger.batch.expires_at
    if over_at is None or ledger.turn.now < over_at + STOP_S:
        return
    held = await ledger.held()
    ids = [one.job_ids(ledger.turn.id)[0] for one in held]
    texts = await ledger.texts(held)
    entries = [lines.not_run(text, ending, id_) for text, id_ in zip(texts, ids, strict=True)]
    await ledger.write(ledger.turn.progress, entries, dropped=held)
