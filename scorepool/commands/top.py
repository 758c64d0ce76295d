"""`scorepool top`: queues, workers and speeds of an API on one screen that refreshes."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from scorepool.commands.connecting import connect, print_json
from scorepool.commands.jobs import duration
from scorepool.commands.running import INTERRUPTED
from scorepool.commands.status import Status, batch_fill, kv_fill, read_status, speed, worker_state
from scorepool.sdk import Client, ScorepoolError, Unreachable

WIDE = 66  # columns of a terminal, from which workers and their jobs/s are shown


def top(url: str, api_key: str | None, *, interval_s: float, is_once: bool, as_json: bool) -> int:
    """Show the status until Ctrl-C, or print it once."""
    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the terminal gets its own screen back
    try:
        with connect(url, api_key) as client:
            shown = read_status(client)
            if as_json:
                print_json(shown)
            elif is_once:
                console.print(screen(shown, console.width))
            else:
                with _display(console) as show:
                    _watch(client, shown, interval_s, console, show)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


@contextmanager
def _display(console: Console) -> Iterator[Callable[[Group], None]]:
    """Yield what shows a screen: in place on a terminal, one below the other elsewhere."""
    if console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            yield lambda group: live.update(group, refresh=True)
    else:
        yield lambda group: console.print(group, "")


def _watch(client: Client, shown: Status, interval_s: float, console: Console, show: Callable[[Group], None]) -> None:
    """Show the status again and again. While the API is away, show the last one and say so."""
    read_at = answered_at = time.monotonic()
    previous: Status | None = None
    problem: str | None = None
    seconds = 0.0
    while True:
        show(screen(shown, console.width, previous, seconds, problem))
        time.sleep(interval_s)
        try:
            previous, shown = shown, read_status(client)
        except (ScorepoolError, Unreachable):
            previous, problem = None, f"no answer for {duration(time.monotonic() - answered_at)}; before it:"
        else:
            now = time.monotonic()
            problem, seconds = None, now - read_at
            read_at = answered_at = now


def screen(
    shown: Status, width: int, previous: Status | None = None, seconds: float = 0.0, problem: str | None = None
) -> Group:
    """Lay the status out. `previous` was read `seconds` before; it gives the rate at which jobs end."""
    head = Text(f"{shown.url}  ", style="bold")
    problem = problem or shown.problem
    head.append(problem or shown.headline, style="red" if problem else "green")
    return Group(head, _totals(shown, previous, seconds), "", _queues(shown), "", _workers(shown, width))


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


def _workers(shown: Status, width: int) -> Table | str:
    if not shown.workers:
        return "no worker is live"
    is_wide = width >= WIDE
    table = Table(*(("worker",) if is_wide else ()), "model", box=None, pad_edge=False)
    for name in ("tokens/s", *(("jobs/s",) if is_wide else ()), "batch", "KV"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for one in shown.workers:
        table.add_row(
            *((Text(one.worker[:12]),) if is_wide else ()),
            Text(one.id),
            speed(one, "tokens_per_s"),
            *((speed(one, "jobs_per_s"),) if is_wide else ()),
            batch_fill(one),
            kv_fill(one),
            Text(worker_state(one)),
        )
    return table
