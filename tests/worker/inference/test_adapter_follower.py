"""A worker follows the records of adapters in Redis, with a real engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from scorepool.engine import Engine, EngineSettings
from scorepool.store import Keys
from scorepool.wire import AdapterRecord, AdapterReport, encode, parse
from scorepool.worker.inference import adapter_follower
from scorepool.worker.inference.adapter_follower import AdapterFollower
from tests.engine.adapters import save_adapter
from tests.tiny_models import TinyModels


@pytest.fixture
def engine(tiny_models: TinyModels) -> Iterator[Engine]:
    engine = Engine(EngineSettings(model=str(tiny_models("llama"))))
    yield engine
    engine.close()


def test_a_worker_that_starts_while_an_adapter_is_replaced_serves_the_one_before(
    redis: Redis, engine: Engine, tiny_models: TinyModels, tmp_path: Path
):
    """The API that replaces it may be dead."""
    old, new = [save_adapter(tiny_models("llama"), tmp_path / name, seed) for seed, name in enumerate(("old", "new"))]
    before = AdapterRecord(serial="a", path=str(old), state="served")
    staged = AdapterRecord(serial="b", path=str(new), state="staged", before=before)
    redis.hset(Keys.adapters("demo"), "sql", encode(staged))
    follower = AdapterFollower(engine, redis, "demo", "w", show=lambda: None)

    follower._look()

    assert [(each.name, each.folder) for each in engine.adapters] == [("sql", str(old))]
    report = parse(redis.hget(Keys.adapter_reports("demo"), "b:w"), AdapterReport, "msgpack")
    assert (report.error, report.fingerprint is not None) == (None, True)

    redis.hset(Keys.adapters("demo"), "sql", encode(AdapterRecord(serial="b", path=str(new), state="served")))
    assert follower._look()
    assert [(each.name, each.folder) for each in engine.adapters] == [("sql", str(new))]


def test_an_adapter_that_cannot_be_loaded_is_tried_again(
    redis: Redis, engine: Engine, tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(adapter_follower, "LOAD_RETRY_S", 0.0)
    folder = tmp_path / "absent"
    redis.hset(Keys.adapters("demo"), "sql", encode(AdapterRecord(serial="a", path=str(folder), state="served")))
    follower = AdapterFollower(engine, redis, "demo", "w", show=lambda: None)

    assert not follower._look()
    assert follower.is_missing("sql")

    save_adapter(tiny_models("llama"), folder, 0)
    assert follower._look()
    assert not follower.is_missing("sql")
    assert [each.name for each in engine.adapters] == ["sql"]
    assert not follower._look()


def test_an_adapter_that_cannot_be_loaded_is_missing_until_it_is_unloaded(redis: Redis, engine: Engine, tmp_path: Path):
    key = Keys.adapters("demo")
    redis.hset(key, "sql", encode(AdapterRecord(serial="a", path=str(tmp_path), state="served")))
    follower = AdapterFollower(engine, redis, "demo", "w", show=lambda: None)
    follower._look()
    assert follower.is_missing("sql")

    redis.hset(key, "sql", encode(AdapterRecord(serial="b", path="", state="unloaded")))
    follower._look()
    assert not follower.is_missing("sql")
