"""Compare jobs through the real stack: a model of 4 bits with the one that it was made from, against torch."""

import asyncio
import inspect
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.convert import convert
from redis import Redis
from typer.testing import CliRunner

import scorepool
from scorepool import AsyncClient, Client, JobFailed, ScorepoolError, wire
from scorepool.cli import app
from scorepool.commands.evaluations import compare as command
from scorepool.engine.model.dequantize import dequantized_weights
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from scorepool.wire.score import DEFAULT_COMPARED
from tests.engine.oracle import Oracle
from tests.tiny_models import ORACLE_FOLDER, VOCAB_SIZE, TinyModels
from tests.worker.conftest import until

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
ROWS = [[(7 * row + 3 * place) % (VOCAB_SIZE - 5) + 3 for place in range(12 + 5 * row)] for row in range(4)]
ITEMS = [wire.ScoreItem(prompt=row[:4], completion=row[4:]) for row in ROWS]


@pytest.fixture(scope="module")
def folders(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a model, of its quantised copy, and of what this one is in float32, for torch."""
    work = tmp_path_factory.mktemp("quantised")
    source = tiny_models("llama")
    convert(str(source), str(work / "4bit"), quantize=True, q_bits=4, q_group_size=32)
    unpacked = Path(shutil.copytree(source, work / "unpacked", ignore=shutil.ignore_patterns(ORACLE_FOLDER)))
    mx.save_safetensors(
        str(unpacked / "model.safetensors"), dict(dequantized_weights(work / "4bit")), {"format": "mlx"}
    )
    return {"base": source, "4bit": work / "4bit", "unpacked": unpacked}


@pytest.fixture(scope="module")
def stack(folders: dict[str, Path], root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("stack")
    models = [f"{name}={folders[name]}" for name in ("base", "4bit")]
    models.append(f"demo={root / 'scorepool' / 'models' / 'demo'}")
    environ = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_DTYPE": "float32",
        "SCOREPOOL_REDIS_APPENDFSYNC": "everysec",
        "SCOREPOOL_LEASE_S": "2",
    }
    with Stack(models, state=state, environ=environ, logs=state / "logs") as stack:
        yield stack


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url) as client:
        yield client


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, Any]:
    """Compute what llama.cpp's perplexity tool reports, by torch in float64 over the whole vocabulary."""
    base, other = Oracle(folders["base"]), Oracle(folders["unpacked"])
    klds, same, deltas, difference = [], [], [], 0.0
    for row in ROWS:
        p, q = (one.logprobs(row)[3:-1] for one in (base, other))
        tokens = (np.arange(len(p)), row[4:])
        klds += np.sum(np.exp(p) * (p - q), axis=-1).tolist()
        same += (p.argmax(axis=-1) == q.argmax(axis=-1)).tolist()
        deltas += (np.exp(q[tokens]) - np.exp(p[tokens])).tolist()
        difference += float(np.sum(q[tokens] - p[tokens]))
    return {
        "klds": klds,
        "mean": np.mean(klds),
        "median": np.median(klds),
        "p99": np.quantile(klds, 0.99),
        "max": max(klds),
        "same_top_p": np.mean(same),
        "mean_delta_p": np.mean(deltas),
        "rms_delta_p": np.sqrt(np.mean(np.square(deltas))),
        "logprob_sum_difference": difference,
    }


def compare(client: Client, **options: Any) -> wire.Result:
    return client.submit(wire.Compare(**{"model": "4bit", "base": "base", "items": ITEMS} | options)).result()


def test_4_bits_against_float32_equal_torch_on_the_whole_vocabulary(client: Client, expected: dict[str, Any]):
    check(compare(client, top_logprobs=-1), expected)


def test_the_sdk_divides_items_into_jobs_and_joins_what_they_find(
    stack: Stack, client: Client, expected: dict[str, Any]
):
    items = [(row[:4], row[4:]) for row in ROWS]
    before = {job.id for job in client.jobs(kind="compare").jobs}
    check(client.compare("4bit", "base", items, top_logprobs=-1), expected)
    assert len({job.id for job in client.jobs(kind="compare").jobs} - before) == len(ROWS)

    async def compare_again() -> wire.Result:
        async with AsyncClient(stack.url) as other:
            return await other.compare("4bit", "base", items)

    found = asyncio.run(compare_again()).comparison
    assert found is not None
    assert (found.num_tokens, found.is_exact) == (len(expected["klds"]), False)
    assert found.kld_lower.mean - 1e-4 <= expected["mean"] <= found.kld_upper.mean + 1e-4
    with pytest.raises(ValueError, match="`items` is empty"):
        client.compare("4bit", "base", [])
    with pytest.raises(ScorepoolError, match=r"items\[4\]: expected at most 512 token ids"):
        client.compare("4bit", "base", [*items, ([5] * 600, [6])], top_logprobs=-1)


def check(result: wire.Result, expected: dict[str, Any]) -> None:
    """Compare an exact comparison of ROWS with torch's."""
    found = result.comparison
    assert found is not None
    assert found.is_exact
    assert (found.num_top, found.num_tokens) == (VOCAB_SIZE, len(expected["klds"]))
    assert found.kld_lower == found.kld_upper
    for name in ("mean", "median", "p99", "max"):
        assert getattr(found.kld_lower, name) == pytest.approx(expected[name], abs=1e-4)
    for name in ("same_top_p", "mean_delta_p", "rms_delta_p"):
        assert getattr(found, name) == pytest.approx(expected[name], abs=1e-4)
    num_tokens = len(expected["klds"])
    assert found.logprob_sum_difference == pytest.approx(expected["logprob_sum_difference"], abs=1e-4 * num_tokens)
    klds = [value for one in found.sequences for value in one.kld_lower]
    assert klds == pytest.approx(expected["klds"], abs=1e-4)
    assert expected["mean"] > 1e-3  # the models differ


def test_the_most_likely_tokens_give_bounds(client: Client, expected: dict[str, Any]):
    found = compare(client, top_logprobs=32).comparison
    assert found is not None
    assert not found.is_exact
    lower = [value for one in found.sequences for value in one.kld_lower]
    upper = [value for one in found.sequences for value in one.kld_upper]
    for low, high, true in zip(lower, upper, expected["klds"], strict=True):
        assert low - 1e-4 <= true <= high + 1e-4
    assert found.same_top_p == pytest.approx(expected["same_top_p"], abs=1e-4)
    assert found.rms_delta_p == pytest.approx(expected["rms_delta_p"], abs=1e-4)


def test_the_result_names_both_models_and_has_the_models_own_logprobs(client: Client):
    result = compare(client)
    found = result.comparison
    assert found is not None
    assert (result.stamp.model, found.base.model) == ("4bit", "base")
    assert result.stamp.fingerprint != found.base.fingerprint
    assert result.stamp.quantization is not None
    assert found.base.quantization is None
    own, base = (client.submit(wire.Score(model=name, items=ITEMS)).result() for name in ("4bit", "base"))
    for compared, mine, theirs, one in zip(
        result.sequences, own.sequences, base.sequences, found.sequences, strict=True
    ):
        assert list(compared.logprobs or ()) == pytest.approx(list(mine.logprobs or ()), abs=1e-4)
        assert list(one.base_logprobs) == pytest.approx(list(theirs.logprobs or ()), abs=1e-4)
        assert (compared.token_ids, compared.text) == (mine.token_ids, mine.text)
    assert client.job(found.base_job_id).kind == "score"


def test_text_is_encoded_by_the_base(client: Client):
    items = [wire.ScoreItem(prompt="import", completion=" os and sys")]
    result = compare(client, items=items)
    scored = client.submit(wire.Score(model="base", items=items)).result()
    assert result.sequences[0].token_ids == scored.sequences[0].token_ids
    assert result.sequences[0].prompt_token_ids == scored.sequences[0].prompt_token_ids


def test_a_model_equals_itself(client: Client):
    found = compare(client, model="base", top_logprobs=-1).comparison
    assert found is not None
    assert found.kld_lower.max == pytest.approx(0, abs=1e-5)
    assert found.same_top_p == 1


def test_a_failure_of_the_base_fails_the_job_by_name(client: Client):
    with pytest.raises(JobFailed, match=r"base 'base', job .*: .*at most 512 fit") as failed:
        compare(client, items=[wire.ScoreItem(prompt="a " * 3000, completion="b")])
    assert failed.value.failure.code == "too_long"


@pytest.mark.parametrize(
    ("options", "expectation"),
    [
        ({"base": "absent"}, "base: .*absent"),
        ({"base": "demo"}, "base: 'demo' has a vocabulary of .* expected models of one vocabulary"),
        ({"top_logprobs": VOCAB_SIZE + 1}, "top_logprobs: expected at most"),
    ],
)
def test_what_cannot_be_compared_is_refused_at_the_door(client: Client, options: dict[str, Any], expectation: str):
    with pytest.raises(ScorepoolError, match=expectation):
        compare(client, **options)


@pytest.mark.parametrize(
    "option",
    [
        {"score": "all"},
        {"targets": [1]},
        {"entropy": True},
        {"packed": True},
        {"truncate": "left"},
        {"top_logprobs": 0},
    ],
)
def test_options_that_do_not_go_with_it_are_refused_by_name(option: dict[str, Any]):
    [name] = option
    with pytest.raises(ValueError, match=f"`{name}`"):
        wire.Compare(model="m", base="b", items=ITEMS, **option)


def test_ranks_and_a_first_token_without_a_distribution(client: Client):
    items = [wire.ScoreItem(prompt="", completion="import os"), wire.ScoreItem(prompt="a", completion=" b")]
    result = compare(client, model="demo", base="demo", items=items, rank=True, top_logprobs=16)
    scored = client.submit(wire.Score(model="demo", items=items, rank=True)).result()
    found = result.comparison
    assert found is not None
    assert found.num_tokens == sum(len(one.token_ids) for one in result.sequences) - 1
    for own, alone, one in zip(result.sequences, scored.sequences, found.sequences, strict=True):
        assert (own.token_ids, own.ranks, own.is_greedy) == (alone.token_ids, alone.ranks, alone.is_greedy)
        assert one.base_ranks == alone.ranks
        assert list(own.logprobs or ()) == pytest.approx(list(alone.logprobs or ()), abs=1e-4, nan_ok=True)
    assert found.sequences[0].same_top[0] is None
    assert json.loads(wire.encode_json(found.sequences[0]))["kld_lower"][0] is None
    with pytest.raises(JobFailed, match=r"items\[0\]: the first token has no distribution"):
        compare(client, model="demo", base="demo", items=[wire.ScoreItem(prompt="", completion="a")])


def test_a_version_that_is_asked_for_is_the_models(client: Client):
    request = wire.Compare(model="4bit", base="base", items=ITEMS, if_weights=3, expires_at=time.time() + 8)
    job = client.submit(request)
    assert client.job(wire.base_job_id(job.id), wait_s=60).status == "finished"
    with pytest.raises(JobFailed, match="expires_at"):
        job.result(60)


def test_an_idempotency_key_gives_the_same_job(stack: Stack, client: Client):
    request = wire.Compare(model="4bit", base="base", items=ITEMS[:1])
    one, other = (client.submit(request, idempotency_key="compare-1") for _ in range(2))
    assert one.id == other.id
    assert json.loads(wire.encode_json(one.result()))["comparison"]["num_tokens"] == 8


@contextmanager
def stopped(stack: Stack, process: str) -> Iterator[None]:
    os.kill(stack.pid(process), signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(stack.pid(process), signal.SIGCONT)


def test_a_job_that_was_canceled_and_deleted_runs_again_under_its_key(stack: Stack, client: Client):
    """As `scorepool compare` goes on after Ctrl-C: the base's job is still there."""
    request = wire.Compare(model="4bit", base="base", items=ITEMS, temperature=0.5)
    with stopped(stack, "worker base"):  # so that it has not ended before it is canceled
        job = client.submit(request, idempotency_key="compare-2")
        client.cancel(job.id)
    client.job(wire.base_job_id(job.id), wait_s=60)
    assert client.job(job.id, wait_s=60).status == "canceled"  # if a worker had it, it is ended there
    client.delete(job.id)
    again = client.submit(request, idempotency_key="compare-2")
    assert again.id == job.id
    found = again.result(60).comparison
    assert found is not None
    assert found.num_tokens == sum(len(row) - 4 for row in ROWS)


def test_a_job_waits_for_a_base_that_is_not_served_and_ends_with_it(client: Client):
    job = client.submit(wire.Compare(model="4bit", base="absent", items=ITEMS[:1], wait_for_model=True))
    time.sleep(2.5)  # it was looked for more than once
    assert client.job(job.id).status in {"queued", "started"}
    client.cancel(wire.base_job_id(job.id))
    with pytest.raises(JobFailed, match=r"base 'absent', job .*: canceled by its owner") as failed:
        job.result(60)
    assert failed.value.failure.code == "canceled"


def test_a_job_that_waits_for_its_base_can_be_canceled(client: Client):
    job = client.submit(wire.Compare(model="4bit", base="absent", items=ITEMS[:1], wait_for_model=True))
    time.sleep(1.5)
    client.cancel(job.id)
    with pytest.raises(JobFailed, match="canceled"):
        job.result(60)
    client.cancel(wire.base_job_id(job.id))


@pytest.mark.parametrize("victim", ["4bit", pytest.param("base", marks=pytest.mark.soak)])
def test_a_kill_of_either_worker_in_the_middle_gives_the_whole_result_once(stack: Stack, client: Client, victim: str):
    rows = [[(row + 3 * place) % (VOCAB_SIZE - 5) + 3 for place in range(40)] for row in range(200)]
    request = wire.Compare(
        model="4bit",
        base="base",
        items=[wire.ScoreItem(prompt=row[:4], completion=row[4:]) for row in rows],
        top_logprobs=64,
        cache=False,
    )
    with Redis.from_url(stack.redis_url) as redis:
        before = int(redis.hget("scorepool:outcomes", "result") or 0)
        job = client.submit(request)
        victims_job = job.id if victim == "4bit" else wire.base_job_id(job.id)
        until(lambda: redis.zcard(f"rq:wip:{victim}"), 60)
        until(lambda: client.job(victims_job).status == "started", 60)
        os.kill(stack.pid(f"worker {victim}"), signal.SIGKILL)
        assert not redis.exists(f"scorepool:outcome:{victims_job}")
        until(lambda: (stack.restart_dead(), client.job(job.id).status == "finished")[1], 120)
        found = job.result(60)
        assert int(redis.hget("scorepool:outcomes", "result") or 0) == before + 2
    expected = client.submit(request).result(60)
    one, other = found.comparison, expected.comparison
    assert one is not None
    assert other is not None
    assert one.num_tokens == other.num_tokens == 36 * 200
    for name in ("mean", "median", "p99", "max"):
        assert getattr(one.kld_lower, name) == pytest.approx(getattr(other.kld_lower, name), abs=1e-4)
    for mine, theirs in zip(found.sequences, expected.sequences, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert list(mine.logprobs or ()) == pytest.approx(list(theirs.logprobs or ()), abs=1e-4)


def write_rows(path: Path) -> Path:
    rows = [{"id": number, "prompt": row[:4], "completion": row[4:]} for number, row in enumerate(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_command_compares_rows_by_compare_jobs_and_prints_the_names_of_llama_cpp(
    stack: Stack, client: Client, expected: dict[str, Any], tmp_path: Path
):
    path, out = write_rows(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    before = {job.id for job in client.jobs(limit=200).jobs}
    options = ["--model", "base", "--model", "4bit", "--model", "demo", "--top-logprobs", "-1", "--tokens"]
    done = CliRunner().invoke(app, ["compare", str(path), "-o", str(out), *options, "--url", stack.url])
    assert done.exit_code == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]

    assert [value for row in rows for value in row["4bit_klds_lower"]] == pytest.approx(expected["klds"], abs=1e-4)
    assert [row["4bit_klds_upper"] for row in rows] == [row["4bit_klds_lower"] for row in rows]
    assert np.mean([value for row in rows for value in row["4bit_klds_lower"]]) == pytest.approx(
        expected["mean"], abs=1e-4
    )
    alone_ids = set()
    for model in ("base", "4bit", "demo"):
        job = client.submit(wire.Score(model=model, items=ITEMS, rank=True))
        alone_ids.add(job.id)
        alone = job.result()
        for row, sequence in zip(rows, alone.sequences, strict=True):
            assert row[f"{model}_logprobs"] == pytest.approx(list(sequence.logprobs or ()), abs=1e-4)
            assert (row[f"{model}_ranks"], row[f"{model}_is_greedy"]) == (sequence.ranks, sequence.is_greedy)
    for row in rows:
        difference = row["4bit_logprob_sum"] - row["base_logprob_sum"]
        assert row["4bit_logprob_sum_difference"] == pytest.approx(difference, abs=1e-6)
        assert (row["demo_mean_kld_lower"], row["demo_klds_lower"], row["demo_same_top_p"]) == (None, None, None)

    lines = dict(
        re.findall(r"^(\S.*?)  +(\S.*)$", done.stderr.partition("4bit (Q) against base (base)")[2], re.MULTILINE)
    )
    assert f"4bit (Q) against base (base), {len(expected['klds'])} tokens" in done.stderr
    assert "demo (Q)" not in done.stderr
    assert float(lines["Mean KLD"].partition(" ")[0]) == pytest.approx(expected["mean"], abs=1e-4)
    assert float(lines["Maximum KLD"]) == pytest.approx(expected["max"], abs=1e-4)
    ordered = sorted(expected["klds"])
    assert float(lines["Median KLD"]) == pytest.approx(ordered[(len(ordered) - 1) // 2], rel=2e-3, abs=1e-4)
    assert float(lines["99.0% KLD"]) == pytest.approx(ordered[int(0.99 * (len(ordered) - 1))], rel=2e-3, abs=1e-4)
    assert float(lines["Same top p"].removesuffix(" %")) == pytest.approx(100 * expected["same_top_p"], abs=0.01)
    assert float(lines["RMS Δp"].removesuffix(" %")) == pytest.approx(100 * expected["rms_delta_p"], abs=0.01)
    after = {job.id for job in client.jobs(limit=200).jobs}
    assert after <= before | alone_ids  # rows are in OUT: their jobs were deleted, and the bases' too


def test_the_divergences_of_a_file_are_bounds_in_python_too(stack: Stack, expected: dict[str, Any], tmp_path: Path):
    path = write_rows(tmp_path / "in.jsonl")
    summary = scorepool.compare_file(path, tmp_path / "o.csv", models=["base", "4bit"], top_logprobs=8, url=stack.url)
    found = summary.divergences["4bit"]
    assert found.num_tokens == len(expected["klds"])
    assert found.kld_lower.mean - 1e-4 <= expected["mean"] <= found.kld_upper.mean + 1e-4
    assert found.kld_upper.max >= expected["max"] - 1e-4
    defaults = [inspect.signature(one).parameters["top_logprobs"].default for one in (scorepool.compare_file, command)]
    assert defaults == [DEFAULT_COMPARED, DEFAULT_COMPARED]
    with pytest.raises(scorepool.FileError, match=r"--top-logprobs is 0: expected at least 1"):
        scorepool.compare_file(path, tmp_path / "o.csv", models=["base", "4bit"], top_logprobs=0, url=stack.url)
