"""The Python SDK: submit jobs over HTTP, wait for them and read their results.

    calls.py         every route as data: method, path, body, type of the reply     pure
    connection.py    send calls, again and again while the API is away              httpx, tenacity
    async_client.py  AsyncClient, and the handles of its jobs
    client.py        Client: the same methods, blocking, on an AsyncClient in a thread
    async_batches.py, batches.py   the methods of both for files and batches
    splitting.py     divide many items into jobs, and join their results            pure
    errors.py        what is raised

To add a route, add a function to calls.py and a method to both clients. tests/scorepool/sdk compares their signatures.
"""

from scorepool.sdk.async_client import AsyncClient, AsyncJob
from scorepool.sdk.client import Client, Job
from scorepool.sdk.connection import split_unix
from scorepool.sdk.errors import BatchTimeout, JobFailed, JobTimeout, ScorepoolError, TokensRestarted, Unreachable
from scorepool.sdk.splitting import MixedResults

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "BatchTimeout",
    "Client",
    "Job",
    "JobFailed",
    "JobTimeout",
    "MixedResults",
    "ScorepoolError",
    "TokensRestarted",
    "Unreachable",
    "split_unix",
]
