"""One scoring job and one generate job through every real part, shown as tables."""

import base64
import math
import os
import secrets
import shutil
import socket
from pathlib import Path
from queue import Empty

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from scorepool import wire
from scorepool.client import Client, JobFailed
from scorepool.local.receiver import Receiver
from scorepool.local.stack import Stack

MODEL = "demo"
PROMPT = "If the file does not exist,"
COMPLETIONS = (" an instance of the class.", " an error is raised.", " the number of bytes.", " a list of strings.")
QUESTION = "What does os.listdir do?"
WEBHOOK_TIMEOUT_S = 30.0


def run(folder: str, state: Path, console: Console) -> None:
    """Raises StackError, JobFailed or ScorepoolError with what went wrong. Nothing is left running, nor in `state`."""
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    environ = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_HOST": "127.0.0.1",
        "SCOREPOOL_API_KEYS": "",
        "SCOREPOOL_WEBHOOK_SECRET": secret,
        "SCOREPOOL_WEBHOOK_ALLOW_PRIVATE": "true",
    }
    place = state / f"demo-{os.getpid()}"
    try:
        with Receiver(secret) as receiver:
            console.print("Starting Redis, the API, an MLX worker and a webhook worker ...")
            with Stack([f"{MODEL}={folder}"], state=place, environ=environ, logs=place / "logs") as stack:
                console.print(f"ready {stack.url}\n")
                with Client(stack.url) as client:
                    show_score(client, receiver, console)
                    show_generate(client, console)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    console.print("Everything is stopped.")


def show_score(client: Client, receiver: Receiver, console: Console) -> None:
    items = [wire.ScoreItem(prompt=PROMPT, completion=completion) for completion in COMPLETIONS]
    request = wire.Score(model=MODEL, items=items, top_logprobs=2, webhook=receiver.url)
    console.print(f"[bold]Score[/bold] {len(items)} completions of {PROMPT!r}")
    job = follow(client, client.submit(request), console)
    assert job.result is not None
    ranked = sorted(zip(COMPLETIONS, job.result.sequences, strict=True), key=lambda pair: -(pair[1].logprob_sum or 0.0))
    table = Table("rank", "completion", "log p", "tokens")
    for rank, (completion, scored) in enumerate(ranked, start=1):
        table.add_row(str(rank), repr(completion), f"{scored.logprob_sum:.3f}", str(len(scored.token_ids)))
    console.print(table)
    console.print(tokens(ranked[0][1], f"Tokens of {ranked[0][0]!r}"))
    try:
        event = receiver.verified.get(timeout=WEBHOOK_TIMEOUT_S)
    except Empty:
        raise TimeoutError(f"no verified webhook arrived within {WEBHOOK_TIMEOUT_S:.0f} s") from None
    assert event["data"]["id"] == job.id
    console.print(f"Webhook {event['type']} for this job: [green]signature verified[/green]\n")


def show_generate(client: Client, console: Console) -> None:
    messages = [wire.Message(role="user", content=QUESTION)]
    request = wire.Generate(model=MODEL, messages=messages, max_tokens=24, temperature=0.0, top_logprobs=2)
    console.print(f"[bold]Generate[/bold] an answer to {QUESTION!r}")
    job = follow(client, client.submit(request), console)
    assert job.result is not None
    scored = job.result.sequences[0]
    console.print(f"{escape(repr(scored.text))}  ({scored.finish_reason})")
    console.print(tokens(scored, "Generated tokens"))


def follow(client: Client, job_id: str, console: Console) -> wire.Job:
    """Show how far the job is until it ends. Raises JobFailed."""
    columns = (
        SpinnerColumn(),
        TextColumn("job {task.fields[job_id]}"),
        BarColumn(20),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        steps = {"queued": 0, "started": 1, "finished": 2, "failed": 2, "canceled": 2}
        task = progress.add_task("queued", total=2, job_id=job_id)
        while True:
            job = client.job(job_id, wait_s=0.2)
            progress.update(task, description=job.status, completed=steps[job.status])
            if job.failure is not None:
                raise JobFailed(job_id, job.failure)
            if job.result is not None:
                return job


def tokens(scored: wire.SequenceResult, title: str) -> Table:
    """One row a token: its text, its logprob, and the likeliest tokens in its place."""
    table = Table("token", "id", "logprob", "p", "likeliest instead", title=title, title_justify="left")
    assert scored.logprobs is not None
    assert scored.top_ids is not None
    assert scored.top_logprobs is not None
    assert scored.top_bytes is not None
    for column in zip(
        scored.token_bytes,
        scored.token_ids,
        scored.logprobs,
        scored.top_bytes,
        scored.top_logprobs,
        strict=True,
    ):
        piece, token_id, logprob, top_bytes, top_logprobs = column
        top = "  ".join(
            f"{shown(alternative)} {value:.2f}" for alternative, value in zip(top_bytes, top_logprobs, strict=True)
        )
        table.add_row(shown(piece), str(token_id), f"{logprob:.4f}", f"{math.exp(logprob):.3f}", top)
    return table


def shown(piece: bytes) -> str:
    return escape(repr(piece.decode(errors="backslashreplace")))


def free_port() -> int:
    """A port that is free, and that the system gives to nobody else for a minute: a connection to it has just ended
    (TIME_WAIT), which is no hindrance to a server that asks for it by its number."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address):
            server.accept()[0].close()
        return int(address[1])
