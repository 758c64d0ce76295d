"""Run one scoring job and one generate job through every process and show the results as tables."""

import base64
import math
import os
import secrets
import socket
from pathlib import Path
from queue import Empty

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from scorepool import wire
from scorepool.local.receiver import Receiver
from scorepool.local.stack import PRIVATE, Stack
from scorepool.sdk import Client, JobFailed

MODEL = "demo"
PROMPT = "If the file does not exist,"
COMPLETIONS = (" an instance of the class.", " an error is raised.", " the number of bytes.", " a list of strings.")
QUESTION = "What does os.listdir do?"
WEBHOOK_TIMEOUT_S = 30.0
PORTS = range(10_000, 32_000)  # systems give higher ones to connections: Linux from 32,768 on, macOS from 49,152 on

_given_ports: set[int] = set()


def run(folder: str, state: Path) -> None:
    """Run the demo and leave nothing behind.

    Raises StackError, RedisServerError, JobFailed, ScorepoolError or TimeoutError.
    """
    console = Console()
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    demo_dir = state / f"demo-{os.getpid()}"
    environ = {
        **PRIVATE,
        "SCOREPOOL_STATE_DIR": str(demo_dir),
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_WEBHOOK_SECRET": secret,
        "SCOREPOOL_WEBHOOK_ALLOW_PRIVATE": "true",
    }
    with Receiver(secret) as receiver:
        console.print("Starting Redis, the API, an MLX worker and a webhook worker ...")
        models, logs = [f"{MODEL}={folder}"], demo_dir / "logs"
        with Stack(models, state=demo_dir, environ=environ, logs=logs, is_temporary=True) as stack:
            console.print(f"ready {stack.url}\n")
            with Client(stack.url) as client:
                show_score(client, receiver, console)
                show_generate(client, console)
    console.print("Everything is stopped.")


def show_score(client: Client, receiver: Receiver, console: Console) -> None:
    """Score completions of one prompt, rank them, and wait for the webhook."""
    items = [wire.ScoreItem(prompt=PROMPT, completion=completion) for completion in COMPLETIONS]
    request = wire.Score(model=MODEL, items=items, top_logprobs=2, webhook=receiver.url)
    console.print(f"[bold]Score[/bold] {len(items)} completions of {PROMPT!r}")
    job = wait_with_progress(client, client.submit(request).id, console)
    assert job.result is not None
    ranked = sorted(zip(COMPLETIONS, job.result.sequences, strict=True), key=lambda pair: -(pair[1].logprob_sum or 0.0))
    table = Table("rank", "completion", "log p", "tokens")
    for rank, (completion, sequence) in enumerate(ranked, start=1):
        table.add_row(str(rank), repr(completion), f"{sequence.logprob_sum:.3f}", str(len(sequence.token_ids)))
    console.print(table)
    console.print(token_table(ranked[0][1], f"Tokens of {ranked[0][0]!r}"))
    try:
        event = receiver.verified.get(timeout=WEBHOOK_TIMEOUT_S)
    except Empty:
        raise TimeoutError(f"no verified webhook arrived within {WEBHOOK_TIMEOUT_S:.0f} s") from None
    assert event["data"]["id"] == job.id
    console.print(f"Webhook {event['type']} for this job: [green]signature verified[/green]\n")


def show_generate(client: Client, console: Console) -> None:
    """Generate an answer to a chat."""
    messages = [wire.Message(role="user", content=QUESTION)]
    request = wire.Generate(model=MODEL, messages=messages, max_tokens=24, temperature=0.0, top_logprobs=2)
    console.print(f"[bold]Generate[/bold] an answer to {QUESTION!r}")
    job = wait_with_progress(client, client.submit(request).id, console)
    assert job.result is not None
    sequence = job.result.sequences[0]
    console.print(f"{escape(repr(sequence.text))}  ({sequence.finish_reason})")
    console.print(token_table(sequence, "Generated tokens"))


def wait_with_progress(client: Client, job_id: str, console: Console) -> wire.Job:
    """Show the job's status until it ends. Raises JobFailed."""
    columns = (
        SpinnerColumn(),
        TextColumn("job {task.fields[job_id]}"),
        BarColumn(20),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        progress_of = {"queued": 0, "started": 1, "finished": 2, "failed": 2, "canceled": 2}
        task = progress.add_task("queued", total=2, job_id=job_id)
        while True:
            job = client.job(job_id, wait_s=0.2)
            progress.update(task, description=job.status, completed=progress_of[job.status])
            if job.failure is not None:
                raise JobFailed(job_id, job.failure)
            if job.result is not None:
                return job


def token_table(sequence: wire.SequenceResult, title: str) -> Table:
    """Build a table with one row per token: text, id, logprob, probability and the most likely alternatives."""
    table = Table("token", "id", "logprob", "p", "most likely", title=title, title_justify="left")
    assert sequence.logprobs is not None
    assert sequence.top_ids is not None
    assert sequence.top_logprobs is not None
    assert sequence.top_bytes is not None
    for column in zip(
        sequence.token_bytes,
        sequence.token_ids,
        sequence.logprobs,
        sequence.top_bytes,
        sequence.top_logprobs,
        strict=True,
    ):
        token_bytes, token_id, logprob, top_bytes, top_logprobs = column
        top = "  ".join(
            f"{quote(alternative)} {value:.2f}" for alternative, value in zip(top_bytes, top_logprobs, strict=True)
        )
        table.add_row(quote(token_bytes), str(token_id), f"{logprob:.4f}", f"{math.exp(logprob):.3f}", top)
    return table


def quote(token_bytes: bytes) -> str:
    """Quote a token's text for display."""
    return escape(repr(token_bytes.decode(errors="backslashreplace")))


def free_port() -> int:
    """Return a free port that this process has not been given before.

    It is below those that systems give to connections, so that none takes it before a server listens on it.
    """
    while True:
        port = PORTS.start + secrets.randbelow(len(PORTS))
        if port in _given_ports:
            continue
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        _given_ports.add(port)
        return port
