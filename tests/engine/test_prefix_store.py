"""Prefixes computed before a restart are loaded, with the numbers of transformers; damaged files are ignored."""

import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from scorepool.engine import Engine, EngineSettings, Sampling, Sequence
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_tokenizer import BOS

LENGTH = 300


def prompt(seed: int = 0) -> list[int]:
    draw = Random(seed)
    return [BOS, *(draw.randrange(3, 500) for _ in range(LENGTH - 1))]


def ask(engine: Engine, number: int, seed: int = 0) -> list[Sequence]:
    """Score one completion of the prompt, and generate from it."""
    given = prompt(seed)
    scored = Sequence(token_ids=[*given, 7, 8, 9 + number], score_from=LENGTH, top_logprobs=2)
    sampling = Sampling(max_tokens=6, temperature=0, ignore_eos=True)
    generated = Sequence(token_ids=[*given, 20 + number], sampling=sampling)
    for one in (scored, generated):
        engine.add([one]).result(60)
    return [scored, generated]


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"))


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, object]:
    return {"prefix_disk_bytes": 2**26, "prefix_folder": str(tmp_path / "prefixes")}


@pytest.mark.parametrize(
    ("name", "mode"),
    [("llama", "default"), ("llama", "exact"), ("gemma3", "default"), ("mamba", "default"), ("qwen3_next", "default")],
)
def test_a_prompt_is_not_computed_again_after_a_restart(
    name: str,
    mode: str,
    disk: dict[str, object],
    folder_of: Callable[[str], Path],
    oracle_of: Callable[[str], Oracle],
):
    settings = EngineSettings(model=str(folder_of(name)), mode=mode, **disk)
    first = Engine(settings)
    before = [*ask(first, 0), *ask(first, 1)]
    first.close()
    assert files_in(Path(str(disk["prefix_folder"])))

    second = Engine(settings)
    after = ask(second, 1)
    stats = second.stats
    second.close()

    [file] = files_in(Path(str(disk["prefix_folder"])))
    memory, on_disk = stats.prefixes.memory, stats.prefixes.disk
    assert (memory.hits, memory.misses, memory.evictions) == (1, 1, 0)
    assert (on_disk.hits, on_disk.misses, on_disk.evictions) == (1, 0, 0)
    assert on_disk.num_bytes == file.stat().st_size > memory.num_bytes > 0
    assert stats.prompt_tokens < 20
    assert stats.cached_tokens >= 2 * (LENGTH - 1)
    for sequence in [*before, *after]:
        assert_agrees(sequence, oracle_of(name))
    for one, other in zip(before[2:], after, strict=True):
        assert other.token_ids == one.token_ids
        if mode == "exact":
            assert other.columns == one.columns


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "gone", "foreign"])
def test_a_damaged_file_is_ignored_and_the_prompt_computed(
    damage: str,
    disk: dict[str, object],
    folder_of: Callable[[str], Path],
    oracle_of: Callable[[str], Oracle],
):
    folder = Path(str(disk["prefix_folder"]))
    settings = EngineSettings(model=str(folder_of("llama")), **disk)
    first = Engine(settings)
    ask(first, 0), ask(first, 1)
    first.close()
    second = Engine(settings)  # has read the folder
    for file in files_in(folder):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        whole = {"flipped": bytes(data), "cut": bytes(data[: len(data) // 2]), "empty": b"", "foreign": b"{}" * 999}
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(whole[damage])
    found = ask(second, 3)
    again = ask(second, 4)
    second.close()

    assert second.stats.prompt_tokens >= LENGTH - 1
    for sequence in [*found, *again]:
        assert_agrees(sequence, oracle_of("llama"))


def test_files_are_bounded_and_the_least_recently_used_go_first(
    disk: dict[str, object], folder_of: Callable[[str], Path], tmp_path: Path
):
    folder = Path(str(disk["prefix_folder"]))
    engine = Engine(EngineSettings(model=str(folder_of("llama")), **disk))
    ask(engine, 0), ask(engine, 1)
    engine.close()
    size = sum(file.stat().st_size for file in files_in(folder))
    unfinished = files_in(folder)[0].with_name("300-0.1.safetensors")
    unfinished.write_bytes(b"0" * 100)  # by a process that was killed

    disk["prefix_disk_bytes"] = size * 2
    engine = Engine(EngineSettings(model=str(folder_of("llama")), **disk))
    for seed in range(1, 6):
        ask(engine, 0, seed), ask(engine, 1, seed)
    deadline = time.monotonic() + 60
    while not engine.stats.prefixes.disk.evictions:  # files are removed on another thread
        assert time.monotonic() < deadline
        ask(engine, 0)
    engine.close()
    counted = engine.stats.prefixes
    assert counted.memory.misses == counted.disk.misses + counted.disk.hits

    kept = files_in(folder)
    assert kept
    assert sum(file.stat().st_size for file in kept) <= size * 2
    assert not unfinished.exists()


def test_other_weights_do_not_find_them(disk: dict[str, object], folder_of: Callable[[str], Path]):
    for name in ("llama", "qwen3"):
        engine = Engine(EngineSettings(model=str(folder_of(name)), **disk))
        ask(engine, 0), ask(engine, 1)
        assert engine.stats.prompt_tokens >= LENGTH - 1
        engine.close()


def test_files_need_a_folder():
    with pytest.raises(ValueError, match="prefix_folder None"):
        EngineSettings(model="x", prefix_disk_bytes=1)
