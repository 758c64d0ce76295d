"""A generate job may have its tokens scored again, and is told the difference (the demo model, the real engine)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from scorepool import wire
from scorepool.engine import Engine, EngineSettings
from scorepool.worker.inference.infer import Run, stamp_of
from scorepool.worker.inference.result import to_result
from scorepool.worker.inference.token_publisher import TokenPublisher


@pytest.fixture(scope="module", params=["default", "exact"])
def engine(request: pytest.FixtureRequest, root: Path) -> Iterator[Engine]:
    engine = Engine(EngineSettings(model=str(root / "scorepool" / "models" / "demo"), mode=request.param))
    yield engine
    engine.close()


@pytest.fixture
def outlet(redis: Redis) -> Iterator[TokenPublisher]:
    outlet = TokenPublisher(redis)
    yield outlet
    outlet.close()


def result_of(engine: Engine, request: wire.Generate, outlet: TokenPublisher) -> wire.Result:
    run = Run(engine, request, "a-job", outlet)
    run.start()
    return to_result(request, run.ended.result(240), engine.tokenizer, stamp_of("demo", engine.model_info))


@pytest.mark.parametrize("prompt_logprobs", [False, True])
def test_generated_tokens_are_scored_again(engine: Engine, outlet: TokenPublisher, prompt_logprobs: bool):
    request = wire.Generate(
        model="demo", prompt="def add(", max_tokens=20, n=3, recompute=True, prompt_logprobs=prompt_logprobs
    )

    for scored in result_of(engine, request, outlet).sequences:
        assert scored.logprobs is not None
        assert scored.recomputed_logprobs is not None
        assert scored.recompute_gap is not None
        completion = scored.logprobs[scored.num_reported_prompt_tokens :]
        pairs = list(zip(completion, scored.recomputed_logprobs, strict=True))
        assert len(pairs) == 20 or scored.finish_reason == "stop"
        assert scored.recompute_gap == max(abs(one - other) for one, other in pairs) <= 5e-5
        if engine.model_info.mode == "exact":
            assert scored.recompute_gap == 0


def test_a_stop_string_that_leaves_no_token_leaves_nothing_to_score(engine: Engine, outlet: TokenPublisher):
    likeliest = result_of(engine, wire.Generate(model="demo", prompt="import", max_tokens=1, temperature=0), outlet)
    request = wire.Generate(
        model="demo",
        prompt="import",
        max_tokens=9,
        temperature=0,
        stop=[likeliest.sequences[0].text],
        recompute=True,
        prompt_logprobs=True,
    )

    (scored,) = result_of(engine, request, outlet).sequences

    assert scored.token_ids[scored.num_reported_prompt_tokens :] == []
    assert scored.recomputed_logprobs is not None
    assert (list(scored.recomputed_logprobs), scored.recompute_gap) == ([], 0)


def test_it_is_not_done_unasked(engine: Engine, outlet: TokenPublisher):
    (scored,) = result_of(engine, wire.Generate(model="demo", prompt="import", max_tokens=2), outlet).sequences

    assert (scored.recomputed_logprobs, scored.recompute_gap) == (None, None)
