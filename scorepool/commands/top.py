"""`scorepool top`: queues, workers and speeds of an API on one screen that refreshes."""

import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from scorepool.commands.connecting import connect, print_json
from scorepool.commands.jobs import duration
from scorepool.commands.running import INTERRUPTED
from scorepool.commands.status import Status, batch_fill, kv_fill, read_status, speed, worker_state


def top(url: str, api_key: str | None, *, interval_s: float, is_once: bool, as_json: bool) -> int:
    """Show the status until Ctrl-C, or print it once."""
    console = Console()
    try:
        with connect(url, api_key) as client:
            shown = read_status(client)
            if as_json:
                print_json(shown)
            elif is_once:
                console.print(screen(shown, None, 0.0))
            else:
                with Live(screen(shown, None, 0.0), console=console, screen=True, auto_refresh=False) as live:
                    while True:
                        read_at = time.monotonic()
                        time.sleep(interval_s)
                        previous, shown = shown, read_status(client)
                        live.update(screen(shown, previous, time.monotonic() - read_at), refresh=True)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def screen(shown: Status, previous: Status | None, seconds: float) -> Group:
    """Lay the status out. `previous` was read `seconds` before; it gives the rate at which jobs end."""
    head = Text(f"{shown.url}  ", style="bold")
    head.append(shown.problem or "ready", style="red" if shown.problem else "green")
    return Group(head, _totals(shown, previous, seconds), "", _queues(shown), "", _workers(shown))


def _totals(shown: Status, previous: Status | None, seconds: float) -> str:
    queued, started = sum(one.queued for one in shown.queues), sum(one.started for one in shown.queues)
    done, failed = shown.ended.get("result", 0), sum(shown.ended.values()) - shown.ended.get("result", 0)
    ended = f"{done:,} finished, {failed:,} failed or canceled"
    if previous is not None and seconds:
        ended += f", {(sum(shown.ended.values()) - sum(previous.ended.values())) / seconds:.1f} jobs/s"
    return f"{queued:,} queued, {started:,} running, {ended}"


def _queues(shown: Status) -> Table:
    table = Table("queue", box=None, pad_edge=False)
    for name in ("queued", "running", "oldest waits"):
        table.add_column(name, justify="right")
    for one in shown.queues:
        table.add_row(one.queue, f"{one.queued:,}", f"{one.started:,}", duration(one.oldest_s) if one.queued else "-")
    return table


def _workers(shown: Status) -> Table | str:
    if not shown.workers:
        return "no worker is live"
    table = Table("worker", "model", box=None, pad_edge=False)
    for name in ("tokens/s", "jobs/s", "batch", "KV"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for one in shown.workers:
        table.add_row(
            Text(one.worker[:12]),
            Text(one.id),
            speed(one, "tokens_per_s"),
            speed(one, "jobs_per_s"),
            batch_fill(one),
            kv_fill(one),
            Text(worker_state(one)),
        )
    return table
