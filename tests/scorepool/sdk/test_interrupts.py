"""Ctrl-C in processes of their own: with an event loop, with threads, in a notebook's kernel, after a fork."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from scorepool import wire
from tests.scorepool.sdk.test_client import JOB, Answer, Sent, server

SETUP = """
import asyncio, os, sys, threading, time
from scorepool import AsyncClient, Client, Score, ScoreItem

url = sys.argv[1]
score = Score(model="demo", items=[ScoreItem(prompt="a", completion="b")])
"""
PROGRAMS = {
    "blocking": """
with Client(url) as client:
    client.submit(score).result()
""",
    "asyncio": """
async def main():
    async with AsyncClient(url) as client:
        job = await client.submit(score)
        await job.result()

asyncio.run(main())
""",
    # A kernel runs its loop without asyncio.Runner, which keeps the first Ctrl-C from code that blocks.
    "blocking in a notebook": """
async def cell():
    with Client(url) as client:
        client.submit(score).result()

asyncio.new_event_loop().run_until_complete(cell())
""",
    "threads": """
found, threads = [], []
try:
    with Client(url) as client:

        def gather():
            try:
                list(client.gather([score]))
            except RuntimeError as error:
                found.append("closed" in str(error))

        threads += [threading.Thread(target=gather) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
finally:
    for thread in threads:
        thread.join()
    print(*found)
""",
    "after a fork": """
with Client(url) as client:
    client.submit(score)
    if os.fork() == 0:
        os.dup2(1, 2)  # so that the two tracebacks do not mix
        with Client(url) as own:
            own.submit(score).result()
    os.wait()
""",
    "sleeping": """
with Client(url) as client:
    client.submit(score)
    client.job("other", wait_s=0.1)
    time.sleep(60)
""",
}
NUM_JOBS = {"threads": 3, "after a fork": 2}


@pytest.fixture
def sent() -> list[Sent]:
    return []


@pytest.fixture
def url(sent: list[Sent]) -> Iterator[str]:
    """Run a server whose jobs never end."""

    def answer() -> Answer:
        path = sent[-1].path
        if path == "/v1/jobs":
            return 202, {}, wire.encode(wire.Accepted(id=f"{next(numbers):032x}", status="queued", location=""))
        if "?wait=" in path:
            time.sleep(0.3)
        return 200, {}, wire.encode(JOB)

    numbers = itertools.count()
    with server(answer, sent=sent) as url:
        yield url


@pytest.mark.parametrize("program", PROGRAMS)
def test_ctrl_c_ends_a_process_at_once_and_cancels_its_jobs(program: str, url: str, sent: list[Sent]):
    num_jobs = NUM_JOBS.get(program, 1)
    # A terminal's Ctrl-C goes to the whole process group.
    process = subprocess.Popen(
        [sys.executable, "-c", SETUP + PROGRAMS[program], url],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while [request.method for request in list(sent)].count("POST") < num_jobs or "wait" not in sent[-1].path:
        assert time.monotonic() < deadline, list(sent)
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT, stderr
    assert stderr.count("\nKeyboardInterrupt") == 1, stderr
    assert stdout.count("\nKeyboardInterrupt") == (program == "after a fork"), stdout
    assert "never retrieved" not in stderr + stdout
    assert stdout.count("True") == (3 if program == "threads" else 0), stderr
    canceled = {request.path for request in sent if request.path.endswith("/cancel")}
    assert canceled == {f"/v1/jobs/{number:032x}/cancel" for number in range(num_jobs)}
