"""Files of computed prefixes are data from outside: one that is not of this model and these tokens is a miss."""

import json
import os
import resource
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from scorepool.engine.model import kv_cache, prefix_file
from scorepool.engine.model.prefix_file import Layout, describe
from scorepool.engine.model.prefix_store import PrefixStore
from scorepool.engine.scheduling.prefix_cache import Prefix

LENGTH, WINDOW = 40, 16


def computed(seed: int = 0, length: int = LENGTH, width: int = 4, dtype: mx.Dtype = mx.float32) -> Prefix:
    """A prefix of drawn tokens, with a layer that attends to all of them and one whose window slides."""
    draw = Random(seed)
    prefix = Prefix(Prefix(None, []), [draw.randrange(500) for _ in range(length)])
    cache: list[Any] = [KVCache(), RotatingKVCache(max_size=WINDOW)]
    for layer in cache:
        keys = mx.random.normal((1, 2, length, width), key=mx.random.key(seed)).astype(dtype)
        layer.update_and_fetch(keys, keys + 1)
    prefix.cache = kv_cache.compact(cache)
    prefix.last_hidden = mx.ones((1, 8), dtype)
    prefix.num_bytes = kv_cache.num_bytes(prefix.cache)
    return prefix


def layout() -> Layout:
    prefix = computed(length=1)
    return Layout(describe(prefix.cache, prefix.last_hidden))


@pytest.fixture
def open_store(tmp_path: Path) -> Callable[..., PrefixStore]:
    def open_(max_bytes: int = 2**20, identity: str = "one") -> PrefixStore:
        return PrefixStore(tmp_path / "prefixes", max_bytes, identity, layout())

    return open_


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "prefixes").glob("*/*.safetensors"))


def stored(open_store: Callable[..., PrefixStore], *prefixes: Prefix, **settings: Any) -> None:
    store = open_store(**settings)
    for prefix in prefixes:
        store.save(prefix)
    store.close()


def named(path: Path, name: str) -> Path:
    """Give a file the name of another prefix, with its own checksum."""
    length, digest, _ = name.split("-")
    return path.rename(path.with_name(f"{length}-{digest}-{zlib.crc32(path.read_bytes()):08x}.safetensors"))


def load(store: PrefixStore, prefix: Prefix) -> bool:
    prefix.cache = prefix.last_hidden = None
    return store.load(prefix)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path, open_store: Callable[..., PrefixStore]):
    prefix, again = computed(), computed()
    stored(open_store, prefix)
    store = open_store()
    assert store.longest([*prefix.token_ids, 1]) == LENGTH
    assert load(store, again)
    assert again.num_bytes == prefix.num_bytes
    for one, other in zip(kv_cache.arrays(prefix.cache), kv_cache.arrays(again.cache), strict=True):
        assert mx.array_equal(one, other)
    store.close()


def test_the_longest_of_many_beginnings_is_found(open_store: Callable[..., PrefixStore]):
    stored(open_store, *(computed(length=length) for length in (20, 21, 33)), computed(seed=1))
    store = open_store()
    whole = computed(length=60).token_ids
    assert [store.longest(whole[:n]) for n in (19, 20, 30, 32, 33, 60)] == [0, 20, 21, 21, 33, 33]
    assert store.longest(computed(seed=1, length=50).token_ids) == LENGTH
    store.close()


@pytest.mark.parametrize(
    "other",
    [
        computed(seed=1),
        computed(seed=1, length=WINDOW // 2),
        computed(width=5),
        computed(dtype=mx.float16),
    ],
    ids=["tokens", "length", "shape", "dtype"],
)
def test_a_file_with_the_name_of_another_is_a_miss(
    other: Prefix, tmp_path: Path, open_store: Callable[..., PrefixStore]
):
    wanted = computed()
    stored(open_store, wanted)
    [name] = [path.name for path in files(tmp_path)]
    shutil.rmtree(tmp_path / "prefixes")
    stored(open_store, other)
    [path] = files(tmp_path)
    path = named(path, name)

    store = open_store()
    assert store.longest(wanted.token_ids) == LENGTH
    assert not load(store, wanted)
    assert not path.exists()
    assert store.longest(wanted.token_ids) == 0
    store.close()


def test_a_file_of_another_model_is_a_miss(tmp_path: Path, open_store: Callable[..., PrefixStore]):
    stored(open_store, computed(), identity="other weights")
    [path] = files(tmp_path)
    own = open_store()
    [folder] = [folder for folder in (tmp_path / "prefixes").iterdir() if folder != path.parent]
    path.rename(folder / path.name)
    store = open_store()
    assert store.longest(computed().token_ids) == LENGTH
    assert not load(store, computed())
    store.close()
    own.close()


def test_numbers_that_are_not_finite_are_a_miss(tmp_path: Path, open_store: Callable[..., PrefixStore]):
    broken = computed()
    broken.cache[1].values = broken.cache[1].values * float("nan")
    stored(open_store, broken)
    store = open_store()
    assert not load(store, computed())
    store.close()


def test_a_file_that_claims_more_than_it_has_is_a_miss(tmp_path: Path, open_store: Callable[..., PrefixStore]):
    stored(open_store, computed())
    [path] = files(tmp_path)
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + size])
    header["0.0"] |= {"shape": [1, 2, 10**12, 4], "data_offsets": [0, 32 * 10**12]}
    claims = json.dumps(header).encode()
    path.write_bytes(len(claims).to_bytes(8, "little") + claims + path.read_bytes()[8 + size :])
    named(path, path.name)
    store = open_store()
    assert store.longest(computed().token_ids) == LENGTH
    assert not load(store, computed())
    store.close()


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "a").write_bytes(b"")


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def replace_by_giant(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(2**40)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("damage", [replace_by_folder, replace_by_pipe, replace_by_link, replace_by_giant])
def test_what_is_no_file_of_ours_is_a_miss(
    damage: Callable[[Path], None], tmp_path: Path, open_store: Callable[..., PrefixStore]
):
    prefix = computed()
    stored(open_store, prefix)
    store = open_store()
    [path] = files(tmp_path)
    damage(path)
    assert not load(store, prefix)
    assert not load(store, prefix)
    store.save(computed(seed=2))
    store.close()
    assert load(open_store(), computed(seed=2))


@pytest.mark.parametrize("instead", [None, b"a file"])
def test_a_folder_that_vanishes_ends_nothing(
    instead: bytes | None, tmp_path: Path, open_store: Callable[..., PrefixStore]
):
    stored(open_store, computed())
    store = open_store()
    shutil.rmtree(tmp_path / "prefixes")
    if instead is not None:
        (tmp_path / "prefixes").write_bytes(instead)
    assert not load(store, computed())
    store.save(computed(seed=2))
    store.close()
    assert len(files(tmp_path)) == (0 if instead else 1)


def test_a_file_whose_time_cannot_be_set_is_loaded(
    open_store: Callable[..., PrefixStore], monkeypatch: pytest.MonkeyPatch
):
    stored(open_store, computed())
    store = open_store()
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert load(store, computed())
    store.close()


def refuse(*_: object, **__: object) -> None:
    raise PermissionError("the folder is read-only")


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, open_store: Callable[..., PrefixStore]):
    store = open_store()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        store.save(computed())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(tmp_path) == []
    store.save(computed(seed=1))
    store.close()
    assert len(files(tmp_path)) == 1


def test_a_file_that_cannot_be_named_is_removed(tmp_path: Path, open_store: Callable[..., PrefixStore]):
    stored(open_store, computed())
    [path] = files(tmp_path)
    replace_by_folder(path)
    stored(open_store, computed())
    assert files(tmp_path) == [path]


def test_the_bound_holds_after_a_restart_with_less_room(tmp_path: Path, open_store: Callable[..., PrefixStore]):
    stored(open_store, *map(computed, range(4)))
    for age, path in enumerate(files(tmp_path)):
        os.utime(path, (age, age))
    oldest, *_ = kept = files(tmp_path)
    size = oldest.stat().st_size
    store = open_store(max_bytes=3 * size + size // 2)
    store.close()
    assert files(tmp_path) == kept[1:]
    assert (store.num_evicted, store.num_bytes) == (1, 3 * size)


def test_folders_without_files_are_removed(tmp_path: Path, open_store: Callable[..., PrefixStore]):
    """Weights that are pushed every minute would leave a folder each."""
    open_store(identity="stored nothing").close()
    stored(open_store, computed(), identity="stored one")
    assert len(list((tmp_path / "prefixes").iterdir())) == 1
    open_store(max_bytes=1, identity="has no room").close()
    assert list((tmp_path / "prefixes").iterdir()) == []


def test_a_prefix_beyond_the_bound_is_not_written(tmp_path: Path, open_store: Callable[..., PrefixStore]):
    stored(open_store, computed(), max_bytes=1000)
    assert files(tmp_path) == []


def test_files_that_are_written_faster_than_they_are_named_are_bounded(
    tmp_path: Path, open_store: Callable[..., PrefixStore], monkeypatch: pytest.MonkeyPatch
):
    may_name, checksum = Event(), prefix_file.checksum
    monkeypatch.setattr(prefix_file, "checksum", lambda *args: may_name.wait(30) and checksum(*args))
    store = open_store(max_bytes=8 * computed().num_bytes)
    assert [store.save(computed(seed)) for seed in range(6)] == [True, True, False, False, False, False]
    assert len(files(tmp_path)) == 2
    may_name.set()
    store.close()
    assert len(files(tmp_path)) == 2
    store = open_store()
    assert load(store, computed(0))
    assert store.save(computed(9))
    store.close()


def test_two_workers_share_a_folder_and_keep_its_bound(tmp_path: Path, open_store: Callable[..., PrefixStore]):
    stored(open_store, computed())
    size = files(tmp_path)[0].stat().st_size
    one, other = (open_store(max_bytes=4 * size) for _ in range(2))
    for seed in range(1, 20):
        one.save(computed(seed))
        other.save(computed(seed + (seed % 2) * 100))
    one.close()
    other.close()
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 4 * size
    for store in (one, other):
        for seed in (*range(20), *range(101, 120)):
            load(store, computed(seed))  # what the other one has removed is a miss
