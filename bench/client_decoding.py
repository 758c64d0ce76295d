"""Measure a client's processor time to receive and read results, packed and not.

    python -m bench.client_decoding [--rows 10000] [--runs 3]

A process serves the recorded replies of the jobs into which the SDK divides the rows. The client receives them over
HTTP and turns them into arrays [rows, tokens, K]. Processor time is that of the client's process alone.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from scorepool import Client, wire
from scorepool.local.demo import free_port
from scorepool.sdk.splitting import ITEMS_PER_JOB, join

JOB_ID = "0" * 32
VOCAB_SIZE = 150_000
STAMP = wire.Provenance(
    model="bench",
    fingerprint="",
    dtype="float32",
    quantization=None,
    adapter=None,
    mode="default",
    backend="",
    versions={},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=200, help="of each row")
    parser.add_argument("--top", type=int, default=20, help="most likely tokens beside each")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small size, to try it out")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.tokens, arguments.runs = 2 * ITEMS_PER_JOB, 20, 1
    num_jobs = -(-arguments.rows // ITEMS_PER_JOB)
    packed = packed_result(ITEMS_PER_JOB, arguments.tokens, arguments.top)
    replies = {"packed": packed, "not packed": packed.unpacked()}
    print(f"{num_jobs} jobs of {ITEMS_PER_JOB} rows x {arguments.tokens} tokens x top {arguments.top}")
    seconds: dict[str, list[float]] = {name: [] for name in replies}
    bodies = {name: wire.encode(job_of(result)) for name, result in replies.items()}
    for _ in range(arguments.runs):
        for name, body in bodies.items():
            with served(body) as url:
                seconds[name].append(measure(url, num_jobs))
    for name, body in bodies.items():
        median = statistics.median(seconds[name])
        print(f"{name:12} {num_jobs * len(body) / 1e6:8.1f} MB {median:8.2f} s of processor time")
    ratio = statistics.median(seconds["not packed"]) / statistics.median(seconds["packed"])
    print(f"ratio, not packed / packed: {ratio:.2f}x")


def packed_result(num_rows: int, num_tokens: int, num_top: int) -> wire.Result:
    """Return a result of random numbers."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, VOCAB_SIZE, (num_rows * num_tokens, num_top), dtype=np.int32)
    logprobs = -draw.random((num_rows * num_tokens, num_top), dtype=np.float32)
    columns = wire.PackedColumns(
        lengths=[num_tokens] * num_rows,
        token_ids=bytearray(ids[:, 0].tobytes()),
        logprobs=bytearray(logprobs[:, 0].tobytes()),
        num_top=num_top,
        top_ids=bytearray(ids.tobytes()),
        top_logprobs=bytearray(logprobs.tobytes()),
    )
    sequence = wire.SequenceResult(token_ids=[], token_bytes=[], text="", num_prompt_tokens=8, logprob_sum=-1.0)
    usage = wire.Usage(prompt_tokens=8 * num_rows, completion_tokens=num_tokens * num_rows)
    return wire.Result(sequences=[sequence] * num_rows, packed=columns, temperature=1.0, usage=usage, stamp=STAMP)


def job_of(result: wire.Result) -> wire.Job:
    return wire.Job(id=JOB_ID, model="bench", kind="score", status="finished", created_at=0.0, result=result)


@contextmanager
def served(body: bytes) -> Iterator[str]:
    """Serve a job's reply from another process."""
    port = free_port()
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(body, port), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{port}"
    try:
        with Client(url) as client:
            client.job(JOB_ID)  # the SDK waits until it listens
        yield url
    finally:
        server.kill()
        server.join()


def _serve(body: bytes, port: int) -> None:
    async def reply(request: Request) -> Response:
        return Response(body, media_type="application/msgpack")

    app = Starlette(routes=[Route("/v1/jobs/{id}", reply)])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def measure(url: str, num_jobs: int) -> float:
    """Return the seconds of processor time to receive the jobs and make arrays of them."""
    with Client(url) as client:
        client.job(JOB_ID)
        before = time.process_time()
        arrays = join([client.job(JOB_ID) for _ in range(num_jobs)], url).arrays()
        seconds = time.process_time() - before
    if arrays["logprobs"].shape[0] != num_jobs * ITEMS_PER_JOB:
        raise AssertionError("rows are missing")
    return seconds


if __name__ == "__main__":
    main()
