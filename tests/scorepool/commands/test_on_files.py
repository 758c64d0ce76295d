"""The options of the commands that work on files, and what they show beside the progress."""

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scorepool.cli import app
from scorepool.commands.on_files import Reporter, interrupt


@pytest.mark.parametrize(
    "arguments",
    [
        ["score", "--temperature", "0"],
        ["generate", "--temperature", "-1"],
        ["generate", "--max-tokens", "0"],
        ["generate", "--top-p", "7"],
        ["generate", "--seed", "-1"],
    ],
    ids=" ".join,
)
def test_an_option_out_of_its_range_ends_the_command_before_it_reads_the_file(arguments: list[str], tmp_path: Path):
    command, name, value = arguments
    out = tmp_path / "out.jsonl"
    done = CliRunner().invoke(app, [command, str(tmp_path / "rows.jsonl"), "-o", str(out), name, value])
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"Invalid value for '{name}'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_every_waiting_job_says_is_shown_once(capsys: pytest.CaptureFixture[str]):
    logger = logging.getLogger("scorepool.test")
    reporter = Reporter()
    logger.addHandler(reporter)
    for _ in range(12):
        logger.warning("no answer yet: %s", "ConnectError")
    logger.info("not shown")
    logger.removeHandler(reporter)
    reporter.close()
    assert capsys.readouterr() == ("", "scorepool: no answer yet: ConnectError\n")


@pytest.fixture
def sigterm() -> Iterator[None]:
    """Handle SIGTERM as the commands do."""
    before = signal.signal(signal.SIGTERM, interrupt)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_cancels_every_task(sigterm: None):
    """An error that is raised in whatever task runs would leave it with a traceback."""
    ends: list[type[BaseException]] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        except BaseException as error:
            ends.append(type(error))
            raise

    async def main() -> None:
        await asyncio.gather(work())

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert ends == [asyncio.CancelledError]


def test_sigterm_stops_a_process_that_ignores_ctrl_c(sigterm: None):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)
