"""`scorepool score --choices`, against every process of two models."""

import csv
import json
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

import scorepool
from scorepool.cli import app
from scorepool.files.scoring.choices import AnswerIs, ChoiceScoring

if TYPE_CHECKING:
    from tests.tiny_models import TinyModels

pytestmark = pytest.mark.timeout(180)
# A row whose likeliest choices by sum, by character and by byte differ is among them: the last choice is long.
CHOICES = ["the dog", "größer als zwölf Häuser", "sun", "a token is scored under the model, given the tokens before it"]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def transformers_sums(folder: Path, prompt: str, choices: list[str]) -> list[float]:
    """Return the sums of logprobs as lm-evaluation-harness computes them: encoded jointly, split at the prompt."""
    from tests.engine.oracle import Oracle
    from tests.tiny_tokenizer import build_tokenizer

    oracle, tokenizer = Oracle(folder), build_tokenizer()
    sums = []
    for choice in choices:
        num_prompt_tokens = len(tokenizer(prompt).input_ids)
        token_ids = tokenizer(prompt + choice).input_ids
        logprobs = oracle.logprobs(token_ids)
        sums.append(sum(logprobs[at - 1, token_ids[at]] for at in range(num_prompt_tokens, len(token_ids))))
    return sums


def test_choices_are_scored_and_picked_as_lm_evaluation_harness_does(
    two_models_url: str, tiny_models: "TinyModels", tmp_path: Path
):
    prompts = ["the quick brown fox jumps over", "def add(first: int) ->", "a token is", "in the sun and then"]
    rows = [{"id": index, "prompt": prompt, "choices": CHOICES} for index, prompt in enumerate(prompts)]
    answers = [0, "sun", 3, 1]
    path = write_rows(tmp_path / "in.jsonl", [row | {"gold": gold} for row, gold in zip(rows, answers, strict=True)])
    out = tmp_path / "out.jsonl"

    summary = scorepool.score_file(
        path, out, model="tiny", choices="choices", answer="gold", delimiter=" ", tokens=True, url=two_models_url
    )

    done = read_rows(out)
    accuracies: dict[str, list[float]] = {"acc": [], "acc_norm": [], "acc_bytes": []}
    lengths = {
        "acc": np.ones(4),
        "acc_norm": np.array([len(choice) for choice in CHOICES]),
        "acc_bytes": np.array([len(choice.encode()) for choice in CHOICES]),
    }
    for row, prompt, gold in zip(done, prompts, (0, 2, 3, 1), strict=True):
        sums = np.array(transformers_sums(tiny_models("llama"), prompt, [f" {choice}" for choice in CHOICES]))
        assert row["choice_logprob_sum"] == pytest.approx(sums.tolist(), abs=1e-4)
        probabilities = np.exp(sums) / np.exp(sums).sum()
        assert row["choice_probability"] == pytest.approx(probabilities.tolist(), rel=1e-3)
        assert row["picked"] == np.argmax(sums)
        assert row["choice_logprob_per_byte"] == pytest.approx((sums / lengths["acc_bytes"]).tolist(), abs=1e-4)
        assert [len(ids) for ids in row["choice_token_ids"]] == row["choice_num_tokens"]
        for name, length in lengths.items():
            accuracies[name].append(float(np.argmax(sums / length) == gold))
            assert row[name] == accuracies[name][-1]
    for name, values in accuracies.items():
        assert summary.means[name].mean == pytest.approx(np.mean(values))
        assert summary.means[name].stderr == pytest.approx(np.std(values, ddof=1) / sqrt(4))


def test_the_first_of_equal_choices_is_picked(two_models_url: str, tmp_path: Path):
    rows = [{"prompt": "the quick", "choices": [" sun", *[" dog"] * 40, " sun"], "gold": 0} for _ in range(20)]
    path, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"

    scorepool.score_file(path, out, model="tiny", choices="choices", answer="gold", url=two_models_url)

    for row in read_rows(out):
        assert len(set(row["choice_logprob_sum"])) == 2
        assert len(row["choice_logprob_sum"]) == 42
        assert row["picked"] in (0, 1)


def test_rows_of_too_few_or_wrong_choices_are_named(two_models_url: str, tmp_path: Path):
    good = {"q": "the dog", "options": [" sleeps", " jumps"], "gold": " jumps"}
    rows = [
        good,
        good | {"options": []},
        good | {"options": "sleeps"},
        good | {"gold": 2},
        good | {"gold": True},
        good | {"options": [" x", " y " * 2000], "gold": 0},
        good | {"options": [f" {number}" for number in range(300)], "gold": " 7"},
        good | {"q": 3},
    ]
    path, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    options = ["--prompt", "q", "--choices", "options", "--answer", "gold", "--model", "tiny", "--url", two_models_url]

    done = CliRunner().invoke(app, ["score", str(path), "-o", str(out), *options])

    assert done.exit_code == 1, done.stderr
    assert "2 rows done, 6 failed" in done.stderr
    assert "acc " in done.stderr
    assert [len(row["choice_logprob_sum"]) for row in read_rows(out)] == [2, 300]
    reasons = {error["line"]: error["reason"] for error in read_rows(tmp_path / "out.jsonl.errors.jsonl")}
    assert list(reasons) == [2, 3, 4, 5, 6, 8]
    assert reasons[3] == (
        "column 'options' is 'sleeps': expected a list of texts that are not empty; in CSV a list in JSON"
    )
    assert reasons[4] == "column 'gold' is 2: expected one of the row's choices, or an index from 0 to 1"
    assert reasons[6].startswith("the row has ")


@pytest.mark.parametrize(
    ("answer_is", "picked"),
    [("auto", [None, 1, 1, 0, None]), ("index", [1, 1, None, 0, 2]), ("text", [2, None, 1, None, 1])],
)
def test_an_answer_that_may_be_a_text_or_an_index(answer_is: AnswerIs, picked: list[int | None]):
    rows = [(["3", "2", "1"], "1"), (["7", "8"], 1), (["7", "8"], "8"), (["7", "8"], "0"), (["0", "2", "1"], "2")]
    scoring = ChoiceScoring("prompt", "choices", "gold", answer_is, "", with_tokens=False)
    for (choices, gold), index in zip(rows, picked, strict=True):
        if index is None:
            with pytest.raises(ValueError, match="expected"):
                scoring._answer_of({"gold": gold}, choices)
        else:
            assert scoring._answer_of({"gold": gold}, choices) == index


def test_choices_in_csv_are_lists_in_json(two_models_url: str, tmp_path: Path):
    path, out = tmp_path / "in.csv", tmp_path / "out.csv"
    path.write_text('prompt,choices,gold\nimport,"["" os"", "" sys""]",1\nimport,"["" os"", "" sys""]", os\n')

    summary = scorepool.score_file(path, out, model="demo", choices="choices", answer="gold", url=two_models_url)

    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["acc"] for row in rows] in (["1.0", "0.0"], ["0.0", "1.0"])
    assert [len(json.loads(row["choice_probability"])) for row in rows] == [2, 2]
    assert summary.means["acc"].mean == 0.5


def test_choices_whose_first_token_has_no_logprob_are_refused(two_models_url: str, tmp_path: Path):
    rows = [{"prompt": prompt, "choices": ["os", "sys"]} for prompt in ("", "import ")]
    path, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"

    summary = scorepool.score_file(path, out, model="demo", choices="choices", url=two_models_url)

    assert summary.num_failed == 1
    [error] = read_rows(tmp_path / "out.jsonl.errors.jsonl")
    assert "expected a prompt" in error["reason"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--answer", "gold"], "--answer, --answer-is and --delimiter belong to choices"),
        (["--choices", "choices", "--text", "prompt"], "--choices is given with --completion or --text"),
        (["--choices", "x"], "has no column 'x': it has 'prompt', 'choices', 'gold'; name yours with --choices"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path: Path, options: list[str], sentence: str):
    path = write_rows(tmp_path / "in.jsonl", [{"prompt": "a", "choices": ["b"], "gold": 0}])
    done = CliRunner().invoke(app, ["score", str(path), "-o", str(tmp_path / "out.jsonl"), *options])
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert sorted(tmp_path.iterdir()) == [path]
