"""A model that several processes hold together gives transformers' numbers, and ends with any of them."""

import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from scorepool.engine import EngineSettings, LoadError, Sampling, Sequence
from scorepool.engine.model.ranks.group import RankGroup
from tests.engine.oracle import Oracle, assert_agrees
from tests.engine.test_against_transformers import tokens

ROOT = Path(__file__).parents[2]


def free_ports(num: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run_ranks(
    folders: list[Path], sequences: list[Sequence], work: Path, *options: str, says: int | None = None
) -> tuple[list[int], list[str], Any]:
    """Run a process for each folder. Return their exit statuses, what they print, and what the first one gives."""
    (work / "hosts").write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(len(folders))]))
    (work / "given").write_bytes(pickle.dumps(sequences))
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.engine.rank_process", str(folder), str(says or len(folders))),
                *(str(work / "given"), str(work / "out"), *options),
            ],
            cwd=ROOT,
            env=os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(work / "hosts")},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, folder in enumerate(folders)
    ]
    printed = [process.communicate(timeout=200)[1] for process in processes]
    out = work / "out"
    return (
        [process.returncode for process in processes],
        printed,
        pickle.loads(out.read_bytes()) if out.exists() else None,
    )


def mixed(question: list[int]) -> list[Sequence]:
    """Return sequences of all kinds; many begin with the question."""
    scores = [Sequence(token_ids=question + tokens(6 + n, n)[1:], score_from=len(question)) for n in range(8)]
    samples = [
        Sequence(token_ids=[*question], sampling=Sampling(max_tokens=8 + n, seed=n), top_logprobs=3) for n in range(4)
    ]
    return [
        *scores,
        *samples,
        Sequence(token_ids=tokens(250, 6), score_from=2, top_logprobs=5),  # longer than a step, so in chunks
        Sequence(token_ids=tokens(230, 7), sampling=Sampling(max_tokens=6, temperature=0)),
        Sequence(token_ids=tokens(5, 1), score_from=0, sampling=Sampling(max_tokens=30, temperature=0)),
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", ["ngram"]),
        *[pytest.param(name, [], marks=pytest.mark.soak) for name in ("llama", "gpt_oss", "qwen3_moe")],
    ],
)
def test_two_ranks_equal_transformers(
    name: str,
    options: list[str],
    folder_of: Callable[[str], Path],
    oracle_of: Callable[[str], Oracle],
    tmp_path: Path,
):
    statuses, printed, out = run_ranks([folder_of(name)] * 2, mixed(tokens(40, 99)), tmp_path, *options)

    assert statuses == [0, 0], printed
    sequences, backend, is_loaded, refused = out
    for sequence in sequences:
        assert_agrees(sequence, oracle_of(name))
    assert sum(sequence.num_cached for sequence in sequences) > 0  # shared prompts are shared on each rank
    if options:
        assert sum(sequence.num_accepted for sequence in sequences) > 0
    assert "2 ranks" in backend
    assert is_loaded  # weights are not dropped
    assert "shared by 2 ranks" in refused[0]
    assert refused[1] is None


@pytest.mark.soak
def test_a_model_that_cannot_be_divided_is_refused(folder_of: Callable[[str], Path], tmp_path: Path):
    statuses, printed, _ = run_ranks([folder_of("gemma2")] * 2, [], tmp_path)

    assert statuses == [1, 1]
    assert "mlx-lm cannot divide a 'gemma2'" in printed[0]


@pytest.mark.soak
def test_heads_that_cannot_be_divided_are_refused(folder_of: Callable[[str], Path], tmp_path: Path):
    statuses, printed, _ = run_ranks([folder_of("llama")] * 3, [], tmp_path)

    assert statuses == [1, 1, 1]
    assert "num_attention_heads is 4: expected a number of ranks that divides it" in printed[0]


@pytest.mark.soak
@pytest.mark.parametrize("others", ["other settings", "other shapes", "other speculation"])
def test_ranks_that_differ_are_refused_before_they_exchange_anything(
    others: str, folder_of: Callable[[str], Path], tmp_path: Path
):
    other = tmp_path / "other"
    other.mkdir()
    for path in folder_of("qwen3_28_layers" if others == "other shapes" else "qwen3").iterdir():
        (other / path.name).symlink_to(path)
    if others == "other settings":
        (other / "generation_config.json").unlink(missing_ok=True)
        (other / "generation_config.json").write_text('{"temperature": 0.5}')
    option = "ngram-first" if others == "other speculation" else "plain"

    statuses, printed, _ = run_ranks([folder_of("qwen3"), other], [], tmp_path, option)

    assert statuses == [1, 1]
    name = "speculation" if others == "other speculation" else "fingerprint"
    assert all(f"the ranks disagree: {name} is" in text for text in printed), printed
    assert "self-test" not in "".join(printed)


class Ranks(RankGroup):
    """What ranks have given, without processes."""

    def __init__(self, given: list[bytes]) -> None:
        self._given = given

    def _gather(self, data: bytes) -> list[bytes]:
        return self._given


def test_what_only_one_rank_names_is_told():
    given = [{"mode": "default", "new": "1" * 5000}, {"mode": "default"}]
    with pytest.raises(LoadError, match=r"the ranks disagree: new is 1+ on rank 0 and absent on rank 1"):
        Ranks([json.dumps(one).encode() for one in given]).agree(given[0])


def test_the_rank_with_least_memory_decides():
    assert Ranks([b"64000000000", b"8000000000"]).smallest(64_000_000_000) == 8_000_000_000


def test_what_is_gathered_may_have_any_length():
    alone = RankGroup.__new__(RankGroup)
    alone.group, alone.size = mx.distributed.init(), 1
    for data in (b"", b"x", b"y" * 10_000):
        assert alone._gather(data) == [data]


@pytest.mark.soak
def test_another_number_of_ranks_is_refused(folder_of: Callable[[str], Path], tmp_path: Path):
    statuses, printed, _ = run_ranks([folder_of("llama")] * 2, [], tmp_path, says=4)

    assert statuses == [1, 1]
    assert "ranks is 4, and mlx.launch started 2" in printed[0]


@pytest.mark.parametrize(
    "options", [{"mode": "exact"}, {"adapters": (("a", "/a"),)}, {"prefix_disk_bytes": 1, "prefix_folder": "/a"}]
)
def test_what_one_process_alone_can_do_is_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match=r"ranks is 2, and .* needs a model in one process"):
        EngineSettings(model="m", ranks=2, **options)
