"""The Python SDK: submit jobs over HTTP, wait for them and read their results.

    calls.py         every route as data: method, path, body, type of the reply     pure
    connection.py    send calls, again and again while the API is away              httpx, tenacity
    async_client.py  AsyncClient: score, classify, embed, generate, and wait for the result
    async_jobs.py    submit, await, stream, cancel and delete jobs, and their handles
    client.py        Client: the same methods, blocking, on an AsyncClient in a thread
    async_models.py, async_batches.py, async_webhooks.py, models.py, batches.py, webhooks.py
                     the methods of both that are not about jobs
    window.py        jobs in flight, in order
    splitting.py     divide many items into jobs, and join their results            pure
    errors.py        what is raised

To add a route, add a function to calls.py and a method to both clients. tests/scorepool/sdk compares their signatures,
and the calls with the API's routes.
"""

from scorepool.sdk.async_client import AsyncClient
from scorepool.sdk.async_jobs import AsyncJobHandle
from scorepool.sdk.client import Client, JobHandle
from scorepool.sdk.connection import split_unix
from scorepool.sdk.errors import (
    BatchTimeout,
    InvalidUrl,
    JobFailed,
    JobTimeout,
    MixedResults,
    NotScorepool,
    ScorepoolError,
    TokensRestarted,
    Unreachable,
)

__all__ = [
    "AsyncClient",
    "AsyncJobHandle",
    "BatchTimeout",
    "Client",
    "InvalidUrl",
    "JobFailed",
    "JobHandle",
    "JobTimeout",
    "MixedResults",
    "NotScorepool",
    "ScorepoolError",
    "TokensRestarted",
    "Unreachable",
    "split_unix",
]
