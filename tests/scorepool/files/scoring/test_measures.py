"""The columns of scores, against transformers in float64 and by hand."""

import json
from math import exp, inf, log
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import scorepool
from scorepool import wire
from scorepool.files.formats.sinks import JsonlSink
from scorepool.files.output.journal import JournaledOutput
from scorepool.files.output.means import Mean
from scorepool.files.rows import Done, Row
from scorepool.files.scoring.columns import ScoreColumns
from scorepool.files.scoring.measures import score_columns
from scorepool.files.scoring.windows import WindowScoring

if TYPE_CHECKING:
    from tests.tiny_models import TinyModels


def sequence(logprobs: list[float], token_bytes: list[bytes], ranks: list[int | None]) -> wire.SequenceResult:
    return wire.SequenceResult(
        text=b"".join(token_bytes).decode(),
        token_ids=list(range(len(logprobs))),
        token_bytes=token_bytes,
        logprobs=wire.Floats(logprobs),
        ranks=ranks,
    )


def test_bits_are_per_byte_of_utf8_also_where_tokens_divide_characters():
    euro = "€".encode()
    columns = score_columns(sequence([-1.0, -0.5, -0.25], [b"a", euro[:1], euro[1:]], [1, 1, 1]), with_tokens=True)
    assert columns["bits_per_byte"] == pytest.approx(1.75 / log(2) / 4, rel=1e-12)
    assert columns["logprob_per_byte"] == pytest.approx(-1.75 / 4, rel=1e-12)
    assert columns["logprob_per_token"] == pytest.approx(-1.75 / 3, rel=1e-12)
    assert columns["perplexity"] == pytest.approx(exp(1.75 / 3), rel=1e-12)
    assert columns["tokens"] == ["a", "\ufffd", "\ufffd\ufffd"]
    assert columns["is_greedy"] is True


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("the dog", 7), (" the dog", 8), (None, 8)], ids=["text", "space", "prompt"]
)
def test_the_space_that_sentencepiece_puts_before_a_text_is_no_byte_of_it(text: str | None, num_bytes: int):
    given = sequence([-1.0, -0.5], [b" the", b" dog"], [1, 1])
    columns = score_columns(given, with_tokens=True, text=text)
    assert columns["logprob_per_byte"] == pytest.approx(-1.5 / num_bytes, rel=1e-12)
    assert columns["tokens"] == [" the", " dog"]
    values = {"token_ids": [1, 2, 3], "text": text}
    later = sequence([-1.0], [b" sleeps"], [1])
    assert WindowScoring(2, 1).columns(values, [given, later])["num_bytes"] == num_bytes + 7


def test_a_token_without_a_logprob_counts_nowhere():
    columns = score_columns(sequence([float("nan"), -2.0], ["größer".encode(), b"b"], [None, 2]), with_tokens=True)
    assert (columns["num_tokens"], columns["logprob_sum"], columns["is_greedy"]) == (1, -2.0, False)
    assert columns["bits_per_byte"] == pytest.approx(2.0 / log(2), rel=1e-12)
    assert columns["logprobs"] == [None, -2.0]
    alone = score_columns(sequence([float("nan")], [b"b"], [None]), with_tokens=False)
    assert {name: value for name, value in alone.items() if value is not None} == {"num_tokens": 0}


def test_a_perplexity_too_large_for_a_float_is_infinite():
    assert score_columns(sequence([-9999.0], [b"b"], [3]), with_tokens=False)["perplexity"] == inf


def test_scores_of_multi_byte_texts_are_those_of_transformers(
    two_models_url: str, tiny_models: "TinyModels", tmp_path: Path
):
    from tests.engine.oracle import Oracle
    from tests.tiny_tokenizer import build_tokenizer

    oracle, tokenizer = Oracle(tiny_models("llama")), build_tokenizer()
    prompt_ids = tokenizer("größer").input_ids
    greedy = list(prompt_ids)
    for _ in range(3):
        greedy.append(int(oracle.logprobs(greedy)[-1].argmax()))
    rows = [{"prompt": "größer", "completion": text} for text in (" 你好", " 🙂 als ñandú", "é")]
    rows.append({"prompt": prompt_ids, "completion": greedy[len(prompt_ids) :]})
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    scorepool.score_file(path, out, model="tiny", url=two_models_url)

    done = [json.loads(line) for line in out.read_text().splitlines()]
    for row, found in zip(rows[:3], done[:3], strict=True):
        token_ids = tokenizer(row["prompt"] + row["completion"]).input_ids
        logprobs = oracle.logprobs(token_ids)
        targets = range(len(prompt_ids), len(token_ids))
        total = sum(logprobs[at - 1, token_ids[at]] for at in targets)
        num_bytes = len(row["completion"].encode())
        assert found["num_tokens"] == len(targets)
        assert found["logprob_sum"] == pytest.approx(total, abs=1e-4)
        assert found["bits_per_byte"] == pytest.approx(-total / log(2) / num_bytes, abs=1e-4)
        assert found["logprob_per_byte"] == pytest.approx(total / num_bytes, abs=1e-4)
        assert found["is_greedy"] == all(logprobs[at - 1].argmax() == token_ids[at] for at in targets)
    assert [found["is_greedy"] for found in done] == [False, False, False, True]


def test_means_and_their_errors_go_on_after_an_end(tmp_path: Path):
    values = [1e9 + 0.25, 1e9 + 0.5, 1e9 + 1.75, 1e9 - 3.0]
    for half in (values[:2], values[2:]):
        output = JournaledOutput(tmp_path / "out.jsonl", JsonlSink(), {}, overwrite=False)
        number = output.counts.num_rows
        rows = [Row(at, at, at, {"id": at}) for at in range(number + 1, number + 3)]
        output.write([Done(row, {}, averaged={"acc": value}) for row, value in zip(rows, half, strict=True)])
        output.save()
        mean = output.counts.means["acc"]
        output.close()
    assert mean.number == 4
    assert mean.mean == pytest.approx(np.mean(values), rel=1e-15)
    assert mean.stderr == pytest.approx(np.std(values, ddof=1) / 2, rel=1e-6)
    assert mean.total == pytest.approx(sum(values), rel=1e-15)
    assert Mean(number=1, mean=2.0).stderr is None


def test_a_text_is_whole_if_no_prompt_comes_before_it():
    assert ScoreColumns(None, "b").whole_text({"b": "x"}) == "x"
    assert ScoreColumns("a", "b").whole_text({"a": "", "b": "x"}) == "x"
    assert ScoreColumns("a", "b").whole_text({"a": "y", "b": "x"}) is None
    assert ScoreColumns("a", "b").whole_text({"a": [1], "b": [2]}) is None
