"""Run jobs whose results nobody needs twice."""

from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from scorepool import wire
from scorepool.sdk import Client, ScorepoolError
from scorepool.sdk.splitting import result_of

DELETING_THREADS = 8  # a job may take less time than a request


def run(client: Client, requests: Iterable[wire.Request], max_in_flight: int) -> Generator[wire.Result]:
    """Yield the results of jobs in order, and delete each job, because a task may have more than Redis holds.

    Raises JobFailed, ScorepoolError, Unreachable. Jobs that were not yielded are then canceled.
    """

    def delete(job: wire.Job) -> None:
        with suppress(ScorepoolError):  # it was deleted, and the reply was lost
            client.delete(job.id)

    ended = client.gather(requests, max_in_flight=max_in_flight)
    with ThreadPoolExecutor(DELETING_THREADS) as threads:
        for job in ended:
            yield result_of(job, client.url)
            threads.submit(delete, job)
