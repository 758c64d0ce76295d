"""The commands on a terminal, in pipes and with files: processes, what they show, exit statuses."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from scorepool import Client, wire
from scorepool.cli import app
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests.guides import run_guide

SCOREPOOL = str(Path(sys.executable).with_name("scorepool"))
OTHER_SCREEN, OWN_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
ENDLESS = wire.Generate(model="demo", prompt="a", max_tokens=1500, n=3, ignore_eos=True)
LARGE = wire.Score(model="demo", items=[wire.ScoreItem(prompt="import", completion=" os" * 50)] * 40, top_logprobs=5)


@pytest.fixture(scope="module")
def stack(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("s")
    environ = {"SCOREPOOL_PORT": str(free_port())}
    with Stack([f"demo={root}/scorepool/models/demo"], state=state, environ=environ, logs=state / "logs") as stack:
        yield stack


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, command: list[str], num_columns: int) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, num_columns, 0, 0))
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)
        self.shown = b""

    def wait_for(self, text: bytes, seconds: float = 120.0) -> bytes:
        """Read until this text is shown; return what was shown since the last call."""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown.decode(errors="replace")
            if select.select([self.master], [], [], 0.1)[0]:
                self.shown += os.read(self.master, 65536)
        before, _, self.shown = self.shown.partition(text)
        return before


@contextmanager
def on_terminal(*arguments: str, num_columns: int = 80) -> Iterator[Terminal]:
    terminal = Terminal([SCOREPOOL, *arguments], num_columns)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


def test_the_first_screen_of_the_readme(stack: Stack, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCOREPOOL_URL", stack.url)
    monkeypatch.setenv("COLUMNS", "80")
    run_guide((root / "README.md").read_text().partition("\n## ")[0], stack.url, tmp_path)


def test_the_file_of_the_readme_is_scored_as_it_says(stack: Stack, root: Path, tmp_path: Path):
    section = (root / "README.md").read_text().partition("## Score a file\n")[2]
    block = section.partition("```console\n")[2].partition("```")[0]
    shown = dict(re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", block, re.MULTILINE))
    (tmp_path / "pairs.jsonl").write_text(shown["cat pairs.jsonl"])
    [command] = [command for command in shown if "scorepool score" in command]
    arguments = [SCOREPOOL, *command.split()[1:], "--url", stack.url]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, shown[command])
    assert (tmp_path / "scored.jsonl.errors.jsonl").read_text() == shown["cat scored.jsonl.errors.jsonl"]
    scored = map(json.loads, (tmp_path / "scored.jsonl").read_text().splitlines())
    for row, expected in zip(scored, shown["cat scored.jsonl"].splitlines(), strict=True):
        for name, value in json.loads(expected).items():
            assert row.pop(name) == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value)
        assert row == {}


def test_a_file_command_draws_a_bar_and_removes_it(stack: Stack, tmp_path: Path):
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps({"text": f"import {index}" + " os" * 40}) + "\n" for index in range(2000)))
    with on_terminal("score", str(path), "-o", str(out), "--url", stack.url) as terminal:
        shown = terminal.wait_for(b" left")
        assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in shown.decode()
        assert re.search(rb"\d+%.*[\d,]+ rows  [\d.,]+ rows/s  [\d,]+ tokens/s  \d:\d\d:\d\d", shown)
        terminal.process.send_signal(signal.SIGINT)
        after = terminal.wait_for(b"scorepool: stopped; the same command goes on where it stopped")
        assert after.endswith(b"\x1b[2K")  # the bar's line is cleared
        assert terminal.process.wait(30) == 130


@pytest.mark.soak
def test_top_shows_work_and_outlives_the_api(stack: Stack):
    with Client(stack.url) as client, on_terminal("top", "--interval", "0.5", "--url", stack.url) as top:
        top.wait_for(OTHER_SCREEN)
        top.wait_for(b"ready")
        job = client.submit(ENDLESS)
        top.wait_for(b"1 running")
        job.cancel()
        os.kill(stack.pid("api"), signal.SIGKILL)
        top.wait_for(b"no answer for ")
        stack.restart_dead()
        shown = top.wait_for(b"ready") + top.wait_for(b"/32")
        for name in (b"queue", b"oldest waits", b"tokens/s", b"batch", b"KV", b"state"):
            assert name in shown
        top.process.terminate()
        top.wait_for(OWN_SCREEN)
        assert top.process.wait(30) == 130


def test_top_fits_a_narrow_terminal(stack: Stack):
    with on_terminal("top", "--url", stack.url, num_columns=44) as top:
        shown = top.wait_for(b"0/32")
        assert b"tokens/s" in shown
        assert "\N{HORIZONTAL ELLIPSIS}".encode() not in shown
        top.process.send_signal(signal.SIGINT)
        assert top.process.wait(30) == 130


def test_top_prints_one_screen_below_the_other_where_there_is_no_terminal(stack: Stack):
    command = [SCOREPOOL, "top", "--interval", "0.5", "--url", stack.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as top:
        assert top.stdout is not None
        heads = (line for line in top.stdout if line.startswith(stack.url))
        assert [next(heads), next(heads)] == [f"{stack.url}  ready\n"] * 2
        top.send_signal(signal.SIGINT)
        assert top.wait(30) == 130
        assert top.stderr is not None
        assert "Traceback" not in top.stderr.read()


def test_a_reader_that_ends_early_gets_no_traceback(stack: Stack):
    with Client(stack.url) as client:
        job = client.submit(LARGE)
        job.result(60)
    command = f"{SCOREPOOL} job {job.id} --json --url {stack.url} | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_a_full_disk_is_named(stack: Stack):
    with Path("/dev/full").open("w") as full:
        command = [SCOREPOOL, "models", "--url", stack.url]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "scorepool: cannot go on: [Errno 28] No space left on device\n")


def test_ctrl_c_ends_a_wait_with_status_130(stack: Stack):
    with Client(stack.url) as client:
        waits = client.submit(wire.Score(model="gone", items=LARGE.items[:1], wait_for_model=True))
        command = [SCOREPOOL, "job", waits.id, "--wait", "250", "--url", stack.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while not any(each.status == "ESTABLISHED" for each in psutil.Process(process.pid).net_connections()):
                time.sleep(0.05)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 130
            assert process.stdout is not None
            assert process.stderr is not None
            assert (process.stdout.read(), process.stderr.read().strip()) == ("", "")


def test_bash_completes_commands_and_values():
    script = complete("source_bash")
    for words, expected in (("scorepool che", "check-model"), ("scorepool jobs --status can", "canceled")):
        typed = f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; _scorepool_completion {SCOREPOOL}"
        command = ["bash", "-c", f"{script}\n{typed}\necho ${{COMPREPLY[*]}}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert (done.stdout.strip(), done.stderr) == (expected, "")


def test_zsh_completes_commands():
    assert "compdef _scorepool_completion scorepool" in complete("source_zsh")
    assert "check-model" in complete("complete_zsh", _TYPER_COMPLETE_ARGS="scorepool che")


def complete(instruction: str, **environ: str) -> str:
    """Return the script for a shell, or what it asks for."""
    environ |= {"_SCOREPOOL_COMPLETE": instruction}
    return CliRunner().invoke(app, env=environ, prog_name="scorepool", catch_exceptions=False).stdout
