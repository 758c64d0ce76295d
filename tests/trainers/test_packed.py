"""Packed results hold the numbers of results that are not packed, and become arrays of the whole."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from scorepool import Client, JobFailed, ScoreItem, ScorepoolError, wire

RAGGED = [([5, 6], [7, 8, 9]), ([1209], [274]), ([5], [16, 305, 274, 312, 885])]
EVEN = [([5 + row], [7, 8, 9, 10]) for row in range(300)]
EVERYTHING: dict[str, Any] = {"top_logprobs": 3, "rank": True, "entropy": True, "targets": [274, 312]}


def assert_same_arrays(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, column in one.items():
        assert column.dtype == other[name].dtype
        np.testing.assert_allclose(column, other[name], atol=1e-4 if column.dtype == np.float32 else 0)


@pytest.mark.parametrize("items", [RAGGED, EVEN], ids=["ragged", "even"])
@pytest.mark.parametrize("options", [{}, EVERYTHING, EVERYTHING | {"score": "all"}, {"temperature": 0.5}])
def test_a_packed_score_has_the_numbers_of_the_other(native: Client, items: Any, options: dict[str, Any]):
    plain = native.score("demo", items, **options)
    packed = native.score("demo", items, packed=True, **options)

    assert_same_arrays(packed.arrays(), plain.arrays())
    assert (packed.temperature, packed.logprobs_mode) == (plain.temperature, plain.logprobs_mode)
    assert packed.usage == plain.usage
    for one, other in zip(packed.unpacked().sequences, plain.sequences, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs.values() == pytest.approx(other.logprobs.values(), abs=1e-4)
        assert (one.top_ids, one.ranks) == (other.top_ids, other.ranks)
        assert one.logprob_sum == pytest.approx(other.logprob_sum, abs=1e-3)
        assert (one.num_prompt_tokens, one.is_greedy) == (other.num_prompt_tokens, other.is_greedy)


def test_the_arrays_have_the_rows_of_the_sequences(native: Client):
    result = native.score("demo", RAGGED, packed=True, score="all", **EVERYTHING)
    arrays = result.arrays()

    assert arrays["lengths"].tolist() == [5, 2, 6]
    assert {name: column.shape for name, column in arrays.items()} == {
        "lengths": (3,),
        "token_ids": (3, 6),
        "logprobs": (3, 6),
        "ranks": (3, 6),
        "entropies": (3, 6),
        "top_ids": (3, 6, 3),
        "top_logprobs": (3, 6, 3),
        "target_logprobs": (3, 6, 2),
    }
    assert arrays["token_ids"][1].tolist() == [1209, 274, -1, -1, -1, -1]
    assert np.isnan(arrays["logprobs"]).tolist()[1] == [True, False, True, True, True, True]
    assert arrays["ranks"][1, 0] == 0
    assert (arrays["top_ids"][1, 0] == -1).all()
    assert np.isnan(arrays["top_logprobs"][0, 0]).all()
    for row, ids in enumerate(native.score("demo", RAGGED, score="all").sequences):
        assert arrays["token_ids"][row, : len(ids.token_ids)].tolist() == ids.token_ids


def test_arrays_of_rows_of_one_length_are_the_results_own_memory(native: Client):
    result = native.score("demo", EVEN, packed=True, top_logprobs=2)
    arrays = result.arrays()

    assert arrays["top_ids"].shape == (300, 4, 2)
    assert np.shares_memory(arrays["top_ids"], np.frombuffer(result.packed.top_ids, np.uint8))
    for name, column in arrays.items():
        tensor = torch.from_dlpack(column)
        assert tensor.data_ptr() == column.ctypes.data
        assert tensor.dtype == {"lengths": torch.int64, "token_ids": torch.int32, "top_ids": torch.int32}.get(
            name, torch.float32
        )


@pytest.mark.parametrize("options", [{}, {"prompt_logprobs": True, "rank": True}, {"logprobs": False}])
def test_a_packed_generation_has_the_numbers_of_the_other(native: Client, options: dict[str, Any]):
    sampling = {"n": 3, "max_tokens": 9, "temperature": 0.8, "top_k": 50, "seed": 3}
    tops = {} if options.get("logprobs") is False else {"top_logprobs": 2, "targets": [5]}

    plain = native.generate("demo", [1209, 274, 312], **sampling, **tops, **options)
    packed = native.generate("demo", [1209, 274, 312], packed=True, **sampling, **tops, **options)

    assert_same_arrays(packed.arrays(), plain.arrays())
    sampled = [[each.sampled_logprobs for each in result.unpacked().sequences] for result in (packed, plain)]
    assert sampled[0] == sampled[1]
    assert ("sampled_logprobs" in packed.arrays()) == ("logprobs" not in options)
    assert [each.finish_reason for each in packed.sequences] == [each.finish_reason for each in plain.sequences]
    assert packed.usage == plain.usage


def test_no_byte_is_sent_that_was_not_asked_for(http: httpx.Client, native: Client):
    body = {"type": "score", "model": "demo", "packed": True, "top_logprobs": 20}
    body["items"] = [{"prompt": [5], "completion": [7] * 200} for _ in range(8)]
    job = http.post("/v1/jobs", json=body, headers={"Prefer": "wait=60", "Accept": "application/msgpack"})

    numbers = 8 * 200 * (2 + 2 * 20) * 4
    assert numbers <= len(job.content) < numbers + 3000
    assert http.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"}).json()["result"]["packed"]["num_top"] == 20


def test_targets_of_several_lengths_are_filled_up(native: Client):
    items = [ScoreItem(prompt=[5], completion=[7, 8], targets=[[1, 2, 3], [4]])]
    [job_id] = [native.submit(wire.Score(model="demo", items=items, packed=True))]
    result = native.result(job_id)

    targets = result.arrays()["target_logprobs"]
    assert targets.shape == (1, 2, 3)
    assert np.isnan(targets[0, 1]).tolist() == [False, True, True]
    plain = native.result(native.submit(wire.Score(model="demo", items=items))).sequences[0].target_logprobs
    assert [list(row) for row in result.unpacked().sequences[0].target_logprobs] == [
        pytest.approx(list(row), abs=1e-5) for row in plain
    ]
    wide = wire.PackedColumns(lengths=[1], token_ids=bytearray(4), num_targets=2, target_logprobs=bytearray(8))
    joined = wire.join_packed([wide, result.packed])
    assert (joined.num_targets, len(joined.target_logprobs)) == (3, 4 * 3 * 3)


def test_an_item_without_targets_has_missing_values_where_others_have_some(native: Client):
    without = ScoreItem(prompt=[5], completion=[7, 8])
    items = [without, ScoreItem(prompt=[5], completion=[9, 9], targets=[1, 2]), without]
    plain, packed, bare = (
        native.submit(wire.Score(model="demo", items=each, packed=is_packed)).result()
        for each, is_packed in [(items, False), (items, True), ([without], True)]
    )

    assert_same_arrays(packed.arrays(), plain.arrays())
    expected = [list(row) for row in plain.sequences[1].target_logprobs]
    rows = [[list(row) for row in each.target_logprobs] for each in packed.unpacked().sequences]
    assert rows == [[[], []], [pytest.approx(row, abs=1e-5) for row in expected], [[], []]]
    none = native.submit(wire.Score(model="demo", items=[replace(without, targets=[]), without], packed=True)).result()
    assert none.arrays()["target_logprobs"].shape == (2, 2, 0)
    joined = wire.join_packed([bare.packed, packed.packed])
    assert joined.lengths == [2, 2, 2, 2]
    assert joined.target_logprobs == b"\0\0\xc0\x7f" * 4 + packed.packed.target_logprobs


def test_a_packed_job_is_verified_shown_and_tabled(native: Client, http: httpx.Client):
    request = wire.Score(
        model="demo", items=[ScoreItem(prompt="a b", completion=" c d")] * 3, packed=True, top_logprobs=2
    )
    job_id = native.submit(request).id
    result = native.result(job_id)

    assert result.to_arrow().column("token_ids").to_pylist() == [each.token_ids for each in result.unpacked().sequences]
    page = http.get(f"/jobs/{job_id}")
    assert page.status_code == 200
    assert str(result.unpacked().sequences[0].token_ids[0]) in page.text
    assert http.get(f"/jobs/{job_id}/compare", params={"with": job_id}).status_code == 200
    for command in (["verify", job_id], ["job", job_id]):
        done = subprocess.run(
            [Path(sys.executable).with_name("scorepool"), *command, "--url", str(http.base_url)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_row_that_cannot_be_scored_is_named_as_elsewhere(native: Client):
    with pytest.raises((JobFailed, ScorepoolError), match=r"items\[299\]"):
        native.score("demo", [*EVEN[:299], ([5], [10**6])], packed=True)


@pytest.mark.parametrize("name", ["stream", "recompute", "target_bytes", "tools"])
def test_what_has_no_arrays_is_refused_by_name(http: httpx.Client, name: str):
    body: dict[str, Any] = {
        "type": "generate",
        "model": "demo",
        "packed": True,
        "messages": [{"role": "user", "content": "a"}],
    }
    body |= {name: [{"name": "f"}] if name == "tools" else True} | ({"targets": [1]} if name == "target_bytes" else {})
    answer = http.post("/v1/jobs", json=body)
    assert answer.status_code == 400
    assert f"`packed` does not go with `{name}`" in json.dumps(answer.json())
