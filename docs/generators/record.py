"""Record what the commands print, for docs/commands.md: `python docs/generators/record.py`, then `make docs`.

The commands run in a new home folder beside a `scorepool serve` of its own on the default port, which serves the demo
model and a quantised copy; the folder is shown as /home/ann.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_lm import convert

from scorepool import Client, Generate, Score, ScoreItem

ROOT = Path(__file__).parents[2]
RECORDINGS = ROOT / "docs/recordings"
SHOWN_HOME = "/home/ann"
QUESTIONS = (
    "How do I open a file?",
    "What does os.path.join return?",
    "When is an error raised?",
    "What is a generator?",
)
ANSWERS = (" None if there is no match.", " an error is raised.", " a list of strings.", " the number of bytes.")
BAD_LINES = {
    55: '{"id": 55, "question": "How do I open a file?", "answer": 7}',
    66: json.dumps({"id": 66, "question": "What is a generator?", "answer": "x " * 10_000}),
    78: "{1: 2}",
}
MODELS = ("--model", "demo=demo", "--model", "demo-4bit=demo-4bit")
NUM_ROWS = 5000
NUM_LONG_JOBS = 40  # more than a worker runs at once, so that `scorepool top` shows a queue
START_S, WARM_S = 60.0, 6.0


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_inputs(home)
        with serving(home):
            record(
                home,
                "score",
                "scorepool score pairs.jsonl -o scored.jsonl --prompt question --completion answer --model demo",
                "head -1 scored.jsonl",
                "tail -3 scored.jsonl.errors.jsonl | cut -c -150",
            )
            record(
                home,
                "generate",
                "scorepool generate prompts.jsonl -o generated.jsonl --max-tokens 8 --temperature 0 --model demo",
                "tail -1 generated.jsonl",
            )
            record(
                home,
                "compare",
                "head -200 pairs.jsonl > few.jsonl",
                "scorepool compare few.jsonl -o compared.jsonl --model demo --model demo-4bit"
                " --prompt question --completion answer",
                "head -1 compared.jsonl | cut -c -150",
            )
            record(home, "plot", "scorepool plot scored.jsonl --column logprob_per_token")
            record(home, "perplexity", "scorepool perplexity docs --glob '*.md' --model demo")
            with Client() as client:
                record_jobs(home, client)
        record(home, "check-model", "scorepool check-model demo")


def write_inputs(home: Path) -> None:
    shutil.copytree(ROOT / "scorepool/models/demo", home / "demo")
    convert(str(home / "demo"), str(home / "demo-4bit"), quantize=True, q_bits=4)
    (home / "docs").mkdir()
    for name in ("architecture", "numbers", "files"):
        shutil.copy(ROOT / f"docs/{name}.md", home / "docs")
    draw = random.Random(4)
    rows = [{"id": i, "question": draw.choice(QUESTIONS), "answer": draw.choice(ANSWERS)} for i in range(NUM_ROWS)]
    lines = [BAD_LINES.get(number, json.dumps(row)) for number, row in enumerate(rows)]
    (home / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    prompts = ("import", "def main(", "If the file does not exist,")
    (home / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def record_jobs(home: Path, client: Client) -> None:
    """Record the commands that show jobs, models and workers."""
    prompt = "If the file does not exist,"
    items = [ScoreItem(prompt=prompt, completion=completion) for completion in ANSWERS[1:3]]
    job = client.submit(Score(model="demo", items=items))
    job.result()
    record(home, "job", f"scorepool job {job.id}")
    record(home, "models", "scorepool models")
    running = [
        client.submit(Generate(model="demo", prompt="import", max_tokens=1500, ignore_eos=True, seed=number))
        for number in range(NUM_LONG_JOBS)
    ]
    time.sleep(WARM_S)  # until the rates are those of this work
    record(home, "jobs", "scorepool jobs --limit 3")
    record(home, "top", "scorepool top --once")
    record(home, "status", "scorepool status")
    record(home, "cancel", f"scorepool cancel {running[-1].id}", f"scorepool cancel {job.id}")
    record(home, "doctor", "SCOREPOOL_REDIS_URL=redis://127.0.0.1:6379 scorepool doctor")


@contextmanager
def serving(home: Path) -> Iterator[None]:
    """Run `scorepool serve` and wait until it is ready."""
    log = home / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["scorepool", "serve", *MODELS], cwd=home, env=environ(home), stderr=output, stdout=output
        )
    try:
        deadline = time.monotonic() + START_S
        while "ready http" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"`scorepool serve` does not start:\n{log.read_text()}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


def record(home: Path, name: str, *commands: str) -> None:
    """Run commands in a shell, and write what a terminal would show."""
    text = ""
    for command in commands:
        done = subprocess.run(
            command,
            shell=True,
            cwd=home,
            env=environ(home),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        text += f"$ {command}\n{done.stdout.replace(str(home), SHOWN_HOME)}"
        if done.returncode:
            text += f"$ echo $?\n{done.returncode}\n"
    (RECORDINGS / f"{name}.txt").write_text(text)


def environ(home: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SCOREPOOL_", "XDG_"))}
    return kept | {"HOME": str(home), "PATH": path, "COLUMNS": "100"}


if __name__ == "__main__":
    main()
