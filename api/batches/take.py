"""The beginnings of lines: read, noted, and then queued. A line is noted first, and so is never forgotten."""

from collections.abc import Sequence

from msgspec.structs import replace

from scorepool import wire
from scorepool.api.batches import lines
from scorepool.api.batches.batch_store import BatchStore
from scorepool.api.batches.check import lines_of
from scorepool.api.batches.lines import Ended, Ending, LineInProgress
from scorepool.api.http.errors import ApiError, QueueFull, Unavailable

MAX_JOBS = 512  # of one batch at once: enough for eight workers, and the next batch has not long to wait
ENTRIES = 500  # lines that end without a job, in one write


async def resubmit(ledger: BatchStore) -> bool:
    """Queue lines whose jobs are not there: there was no room, or a driver died first. Returns whether there is room
    for more. Raises LeaseLost."""
    held = await ledger.held()
    statuses = await ledger.statuses(held)
    lost = [one for one, found in zip(held, statuses, strict=True) if None in found]
    for one, text in zip(lost, await ledger.texts(lost), strict=True):
        try:
            requests = lines.LineCall.parse(text, ledger.batch, one.job_ids(ledger.turn.id)[0]).to_requests(
                ledger.batch
            )
        except wire.Invalid as error:
            refused = lines.refused(text, error, one.job_ids(ledger.turn.id)[0])
            await ledger.write(ledger.turn.progress, [refused], dropped=[one])
            continue
        if not await _submit(ledger, one, requests):
            return False
    return True


async def take(ledger: BatchStore, ending: Ending | None) -> bool:
    """Read on as far as there is room. Once the batch is over, no line gets jobs, and so there always is. Returns
    whether there was a line. Raises LeaseLost."""
    room = MAX_JOBS - sum(one.num_jobs for one in await ledger.held())
    has_moved, turn = False, ledger.turn
    while room > 0 and not turn.progress.is_read:
        before = turn.progress
        part = await ledger.parts.files.part(before.batch.input_file_id, before.part)
        if part is None:
            await turn.commit(replace(before, is_read=True))
            break
        texts = lines_of(part)
        entries: list[Ended] = []
        taken: dict[LineInProgress, tuple[bytes, list[wire.Request]]] = {}
        line, number = before.line, before.number
        while line < len(texts) and room > 0 and len(entries) < ENTRIES and not (line > before.line and turn.is_waning):
            text, line, number = texts[line], line + 1, number + 1
            if not text:
                continue
            begun = await _begin(ledger, text, number, ending)
            if isinstance(begun, Ended):
                entries.append(begun)
            else:
                taken[LineInProgress(number, len(begun))] = (text, begun)
                room -= len(begun)
        is_whole = line == len(texts)
        after = replace(
            before,
            part=before.part + is_whole,
            line=0 if is_whole else line,
            number=number,
            num_taken=before.num_taken + len(entries) + len(taken),
        )
        await ledger.write(after, entries, taken={one: text for one, (text, _) in taken.items()})
        has_moved = True
        for one, (_, requests) in taken.items():
            if not await _submit(ledger, one, requests):
                return True
    return has_moved


async def _begin(ledger: BatchStore, text: bytes, number: int, ending: Ending | None) -> Ended | list[wire.Request]:
    unique = lines.job_id(ledger.turn.id, number, 0)
    if ending is not None:
        return lines.not_run(text, ending, unique)
    try:
        return await lines.accept(ledger.parts, text, ledger.batch, unique)
    except (wire.Invalid, ApiError) as error:
        return lines.refused(text, error, unique)


async def _submit(ledger: BatchStore, held: LineInProgress, requests: Sequence[wire.Request]) -> bool:
    """False if the queue is full or lacks replicas. What was queued before stays as it is: the ids are the same."""
    parts, turn = ledger.parts, ledger.turn
    await parts.models.serving(request.model for request in requests)
    try:
        await parts.submission.enqueue(turn.owner, requests, held.job_ids(turn.id), turn.id, batch_id=turn.id)
    except (QueueFull, Unavailable):
        return False
    return True
