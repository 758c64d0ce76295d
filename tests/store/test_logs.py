"""Every process logs in one format: which line, when, how grave, whose, about which job."""

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scorepool.store import logs

CLI = (sys.executable, "-c", "from scorepool.cli import app; app()")
PROGRAM = """
import logging, sys
from rq.logutils import setup_loghandlers
from scorepool.store import logs
setup_loghandlers("INFO", name="rq.worker")  # as `rq worker` does before it makes the worker
logs.configure("worker", sys.argv[1], "INFO", model="demo", worker="mac")
log = logging.getLogger("scorepool.worker.rq")
"""


def run(root: Path, log_format: str, statements: str) -> list[str]:
    """Run statements in a process that logs in the format. Return the lines that it writes."""
    command = [sys.executable, "-c", PROGRAM + statements, log_format]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=60)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_a_line_says_when_how_grave_and_about_what(root: Path):
    [line, rq, other] = run(
        root,
        "text",
        'log.info("begins %s", "score", extra={"job": "j1"})\n'
        'logging.getLogger("rq.worker").info("Worker mac: \\x1b[32;01mstarted\\x1b[39;49;00m")\n'
        'with logs.about(job="j2", model="other"): logging.getLogger("a.library").warning("a warning")\n'
        'logging.getLogger("a.library").info("no line")\n'
        'log.debug("no line")\n',
    )
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf"{time} INFO worker\[\d+\] model=demo worker=mac job=j1: begins score", line)
    assert re.fullmatch(rf"{time} INFO worker\[\d+\] model=demo worker=mac: started", rq)
    assert re.fullmatch(rf"{time} WARNING worker\[\d+\] model=other worker=mac job=j2: a warning", other)


def test_a_line_of_json_has_the_same_fields(root: Path):
    fails = 'try: 1 / 0\nexcept ZeroDivisionError: log.exception("x")'
    statements = f'log.info("begins %s", "score\\n", extra={{"job": "j1"}})\n{fails}'
    [line, failed] = [json.loads(line) for line in run(root, "json", statements)]
    assert re.fullmatch(r"worker\[\d+\]", line.pop("process"))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "INFO",
        "model": "demo",
        "worker": "mac",
        "job": "j1",
        "logger": "scorepool.worker.rq",
        "message": "begins score\n",
    }
    assert failed["traceback"].splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_a_hostile_text_can_neither_forge_a_line_nor_reach_the_terminal(root: Path):
    forged = "2026-01-01T00:00:00.000Z CRITICAL api[1]: forged"
    statements = f'log.warning("model %s", "x\\n{forged}\\r\\x1b]0;t\\x07\\x9b\\u2028\\ud800")'
    [head, second] = run(root, "text", statements)
    assert head.endswith(": model x")
    assert second == rf"    {forged}\x0d\x1b]0;t\x07\x9b\u2028\ud800"
    [line] = run(root, "json", statements)
    assert json.loads(line)["message"].startswith(f"model x\n{forged}")
    assert line.isascii()
    assert line.isprintable()


def test_an_error_that_ends_the_process_is_a_line(root: Path):
    [line] = run(root, "json", 'raise RuntimeError("no way on")')
    assert json.loads(line)["level"] == "CRITICAL"
    assert json.loads(line)["traceback"].endswith("RuntimeError: no way on")
    assert run(root, "json", 'import warnings; warnings.warn("old")')[0].startswith('{"time": ')


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_sentence_that_ends_a_process_is_its_last_line(root: Path, log_format: str):
    [line] = run(root, log_format, 'logs.end_process("SCOREPOOL_PORT is taken")')
    said = json.loads(line)["message"] if log_format == "json" else line.removeprefix("scorepool: ")
    assert said == "SCOREPOOL_PORT is taken"


@pytest.mark.parametrize(
    ("command", "environ"),
    [
        ([sys.executable, "-m", "scorepool.api"], {"SCOREPOOL_PORT": "x"}),
        ([*CLI, "worker", "--webhooks"], {"SCOREPOOL_REDIS_URL": "unix:///nowhere"}),
    ],
)
def test_a_start_that_fails_before_its_log_is_set_up_ends_with_a_line_of_json(
    command: list[str], environ: dict[str, str], root: Path
):
    environ = os.environ | environ | {"SCOREPOOL_LOG_FORMAT": "json"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environ, timeout=60)
    [line] = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 1
    assert line["level"] == "CRITICAL"
    assert line["message"].startswith("SCOREPOOL_")


def test_what_a_block_is_about_ends_with_the_block(caplog: pytest.LogCaptureFixture):
    formatter = logs.TextFormatter("api", {})
    record = logging.LogRecord("x", logging.INFO, "", 0, "m", (), None)
    with logs.about(job="outer"):
        with logs.about(model="m1"):
            assert formatter.format(record).endswith(" model=m1 job=outer: m")
        assert formatter.format(record).endswith(" job=outer: m")
    assert "job=" not in formatter.format(record)
