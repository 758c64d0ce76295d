"""A generate job can have its tokens scored again and reports the difference (demo model, real engine)."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from scorepool import wire
from scorepool.engine import Engine, EngineSettings, Sequence
from scorepool.worker.inference.inference_run import InferenceRun
from scorepool.worker.inference.owner_turns import OwnerThread
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.provenance import provenance_of
from scorepool.worker.inference.result import to_result
from scorepool.worker.inference.token_publisher import TokenPublisher
from scorepool.worker.rq.job import Job


@pytest.fixture(scope="module", params=["default", "exact"])
def engine(request: pytest.FixtureRequest, root: Path) -> Iterator[Engine]:
    engine = Engine(EngineSettings(model=str(root / "scorepool" / "models" / "demo"), mode=request.param))
    yield engine
    engine.close()


@pytest.fixture
def publisher(redis: Redis) -> Iterator[TokenPublisher]:
    publisher = TokenPublisher(redis)
    yield publisher
    publisher.close()


def result_of(engine: Engine, request: wire.Generate, publisher: TokenPublisher) -> wire.Result:
    def build(request: wire.Request, prepared: list[PreparedSequence]) -> wire.Result:
        return to_result(request, prepared, engine.chat, provenance_of("demo", engine.model_info))

    run = InferenceRun(engine, request, Job("a-job", Redis()), publisher, build, OwnerThread("results"))
    assert run.advance(1000) is None
    return build(request, run.ended.result(240))


def test_a_salted_job_is_recomputed_within_its_scope(
    engine: Engine, publisher: TokenPublisher, monkeypatch: pytest.MonkeyPatch
):
    scopes: list[str | None] = []
    add = engine.add

    def recording_add(sequences: list[Sequence], **options: Any) -> "Future[list[Sequence]]":
        scopes.extend(each.prefix_scope for each in sequences)
        return add(sequences, **options)

    monkeypatch.setattr(engine, "add", recording_add)
    request = wire.Generate(model="demo", prompt="def add(", max_tokens=2, recompute=True, cache_salt="s")
    result_of(engine, request, publisher)

    [scope, recomputed_scope] = scopes
    assert scope is not None
    assert recomputed_scope == scope


def test_a_job_is_computed_anew_if_its_adapter_was_replaced_before_its_tokens_are_scored_again(
    engine: Engine, publisher: TokenPublisher, monkeypatch: pytest.MonkeyPatch
):
    """Else the difference would be that of two adapters, under the name of the second."""
    calls: list[str] = []
    add = engine.add

    def add_with_new_adapter(sequences: list[Sequence], **options: Any) -> "Future[list[Sequence]]":
        calls.append("score" if sequences[0].sampling is None else "generate")
        future = add(sequences, **options)
        label = "sql@1" if len(calls) == 1 else "sql@2"

        def name_adapter(ended: "Future[list[Sequence]]") -> None:
            for sequence in ended.result():
                sequence.model_info = replace(engine.model_info, adapter=label)

        future.add_done_callback(name_adapter)  # before that of the run
        return future

    monkeypatch.setattr(engine, "add", add_with_new_adapter)
    request = wire.Generate(model="demo", prompt="def add(", max_tokens=2, recompute=True)
    (generated,) = result_of(engine, request, publisher).sequences

    assert calls == ["generate", "score", "generate", "score"]
    assert generated.recompute_gap is not None


@pytest.mark.parametrize("prompt_logprobs", [False, True])
def test_generated_tokens_are_recomputed(engine: Engine, publisher: TokenPublisher, prompt_logprobs: bool):
    request = wire.Generate(
        model="demo", prompt="def add(", max_tokens=20, n=3, recompute=True, prompt_logprobs=prompt_logprobs
    )

    for generated in result_of(engine, request, publisher).sequences:
        assert generated.logprobs is not None
        assert generated.recomputed_logprobs is not None
        assert generated.recompute_gap is not None
        completion = generated.logprobs[generated.num_reported_prompt_tokens :]
        pairs = list(zip(completion, generated.recomputed_logprobs, strict=True))
        assert len(pairs) == 20 or generated.finish_reason == "stop"
        assert generated.recompute_gap == max(abs(one - other) for one, other in pairs) <= 5e-5
        if engine.model_info.mode == "exact":
            assert generated.recompute_gap == 0


def test_nothing_is_recomputed_if_a_stop_string_leaves_no_token(engine: Engine, publisher: TokenPublisher):
    greedy = result_of(engine, wire.Generate(model="demo", prompt="import", max_tokens=1, temperature=0), publisher)
    request = wire.Generate(
        model="demo",
        prompt="import",
        max_tokens=9,
        temperature=0,
        stop=[greedy.sequences[0].text],
        recompute=True,
        prompt_logprobs=True,
    )

    (generated,) = result_of(engine, request, publisher).sequences

    assert generated.token_ids[generated.num_reported_prompt_tokens :] == []
    assert generated.recomputed_logprobs is not None
    assert (list(generated.recomputed_logprobs), generated.recompute_gap) == ([], 0)


def test_nothing_is_recomputed_by_default(engine: Engine, publisher: TokenPublisher):
    (generated,) = result_of(engine, wire.Generate(model="demo", prompt="import", max_tokens=2), publisher).sequences

    assert (generated.recomputed_logprobs, generated.recompute_gap) == (None, None)
