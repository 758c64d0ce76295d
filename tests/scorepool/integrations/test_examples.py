"""The examples and the guides run, and print what the demo model finds."""

import runpy
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from scorepool.local.stack import Stack
from tests.guides import check, run_guide

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def run(stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Run an example in this process, which has imported most of what it needs."""

    def run(name: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, stack.url])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_run_here_or_beside_lm_eval_or_trl():
    files = ("test_examples.py", "test_lm_eval.py", "../../trainers/test_grpo.py")
    tests = "".join((Path(__file__).parent / name).read_text() for name in files)
    examples = [path.name for path in EXAMPLES.glob("*.py")]
    assert len(examples) >= 10
    assert [name for name in examples if f'"{name}"' not in tests] == []


def test_datasets_map(run: Callable[[str], str]):
    assert [line.split()[-2:] for line in run("score_dataset.py").splitlines()[1:]] == [
        ["-11.85", "5"],
        ["-14.56", "5"],
        ["-5.85", "1"],
    ]


def test_pandas(run: Callable[[str], str]):
    words = [row.split() for row in run("score_pandas.py").splitlines()]
    assert words[0] == ["prompt", "completion", "logprob", "per_token", "rank", "generated"]
    assert [(row[0], row[-3]) for row in words[1:3]] == [("If", "1"), ("If", "2")]
    assert [row[-2:] for row in words[1:3]] == [["it", "is\\n"]] * 2
    assert [row[1] for row in words[3:]] == ["os", "the"]


def test_polars(run: Callable[[str], str]):
    printed = run("score_polars.py")
    assert "Return the number of items." in printed
    assert "tsrif" not in printed


def test_parquet(run: Callable[[str], str]):
    first, *rows = run("score_parquet.py").splitlines()
    assert first == "4 rows, 0 failed"
    assert [row.split("'")[1] for row in rows] == [
        " 7.",
        " the number of bytes.",
        " a list of strings.",
        " an error is raised.",
    ]
    assert rows[-1].endswith("ranks [12, 6, 1, 1, 2]")


def test_perplexity_of_a_folder(run: Callable[[str], str]):
    rows = [line.split() for line in run("perplexity_folder.py").splitlines()]
    assert [name for _, name, *_ in rows] == ["noise.txt", "code.txt", "prose.txt", "all,"]
    assert float(rows[2][0]) == pytest.approx(0.73, abs=0.011)


def test_stream(run: Callable[[str], str]):
    text = run("stream_logprobs.py")
    assert text.count(" not ") == 12
    check(text.partition("\n")[0], "  -1.355  ' the'         not ' it'")


def test_gather(run: Callable[[str], str]):
    assert run("gather_jobs.py").startswith("{'result': 19, 'too_long': 1}\nthe likeliest is 'return ")


def test_openai_batch(run: Callable[[str], str]):
    check(
        run("openai_batch.py"),
        "completed 3 of 3\n"
        " -1.556 nats per token  'importimportimportimportimportimportimport'\n"
        " -1.309 nats per token  'def main(cmd, cmd, c'\n"
        " -1.591 nats per token  'If the file does not exist, it is\\nsuit'",
    )


def test_webhook_receiver(run: Callable[[str], str]):
    check(run("receive_webhooks.py"), "job.finished True -5.851")


def test_distillation(run: Callable[[str], str]):
    *shapes, mass = run("distillation_targets.py").splitlines()
    assert shapes == ["labels int64 (2, 5)", "teacher_ids int64 (2, 5, 16)", "teacher_logprobs float32 (2, 5, 16)"]
    check(mass, "probability of the 16 likeliest: 0.76 0.62 0.77 0.96 0.95")


def test_policy_and_reference(run: Callable[[str], str]):
    *rollouts, weights = run("policy_and_reference.py").splitlines()
    assert len(rollouts) == 8
    assert sum(float(line.split()[0]) for line in rollouts) == pytest.approx(0, abs=0.04)
    assert {abs(float(line.split()[0])) for line in rollouts[4:]} == {0.5}
    assert weights.startswith("weights of the policy: ")


@pytest.mark.soak
@pytest.mark.skipif(find_spec("ray") is None, reason="needs `pip install 'ray[data]'`, which no extra brings")
def test_ray(run: Callable[[str], str]):
    assert [row.split()[1] for row in run("score_ray.py").splitlines()[1:]] == ["module_3", "module_2", "module_32"]


@pytest.mark.parametrize("name", ["index", "researchers", "trainers", "evaluators"])
def test_guide(name: str, stack: Stack, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCOREPOOL_URL", stack.url)
    monkeypatch.setenv("COLUMNS", "80")
    run_guide((root / f"docs/{name}.md").read_text(), stack.url, tmp_path)
