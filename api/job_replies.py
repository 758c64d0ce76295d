"""Reply with a job: as a whole, or as a stream if its result is in the result store."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.http.errors import Unavailable
from scorepool.api.http.large_replies import HeldResults
from scorepool.api.http.streamed_job import StoredResultBroken, StreamedJob
from scorepool.api.repositories.jobs import Jobs
from scorepool.api.repositories.stored_results import Damaged, StoredResults


class JobReplies:
    """Replies of one API process. Whoever reads the job says `held.leaves_stored` before."""

    def __init__(self, jobs: Jobs, stored_results: StoredResults) -> None:
        self._jobs = jobs
        self._stored_results = stored_results

    async def reply(
        self,
        request: Request,
        owner: str,
        job: wire.Job,
        held: HeldResults,
        reply_format: wire.Format,
        headers: Mapping[str, str],
    ) -> Response:
        """Encode a job that was read with `held`. The body of the request must have been read.

        Raises NotFound, TooManyResults, Unavailable.
        """
        if held.stored is None:
            return await held.reply(lambda: job, reply_format, headers=headers)
        try:
            first, rest = await self._stored_results.begin(job.id, held.stored, held.add_up_to)
        except Damaged:
            held.leaves_stored = False
            lost = await self._jobs.read(owner, job.id, held)  # says so, and logs it
            return await held.reply(lambda: lost, reply_format, headers=headers)
        frames = _rest(rest)
        return StreamedJob(request, job, held.stored.num_sequences, first, frames, held, reply_format, headers)


async def _rest(frames: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Pass frames on. It is too late for a status: raises StoredResultBroken."""
    try:
        async with aclosing(frames):
            async for frame in frames:
                yield frame
    except Unavailable as error:
        raise StoredResultBroken(error.message) from None
