"""A schema that costs a minute or gigabytes fails alone, while a second tenant's jobs of the same worker end."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis

from scorepool import wire
from scorepool.engine import Engine
from scorepool.store import JobField
from scorepool.worker.inference.run_inference import InferenceRunner
from scorepool.worker.inference.token_publisher import TokenPublisher
from scorepool.worker.rq.in_flight import AsyncResult
from scorepool.worker.rq.job import Job
from tests.engine.conftest import engine_of, folder_of
from tests.tiny_models import TinyModels

__all__ = ["TinyModels", "engine_of", "folder_of"]

NUM_BOMBS = 12  # each takes 3.5 s of a processor until it is refused, so they outlast the second tenant's jobs


def compile_bomb(number: int) -> dict[str, Any]:
    return {"allOf": [{"type": "string", "pattern": f"(.*a){{{k}}}"} for k in range(1, 17)], "title": str(number)}


def step_bomb(number: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^(.*a.{{{500 + number}}}b)+$"}


SMALL: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "dog"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}


class Tenant:
    """Start jobs under one name."""

    def __init__(self, runner: InferenceRunner, name: str) -> None:
        self._runner = runner
        self._name = name
        self._num_jobs = 0

    def start(self, request: wire.Request) -> AsyncResult:
        self._num_jobs += 1
        job = Job(f"{self._name}-{self._num_jobs}", Redis())
        job.fields = {JobField.OWNER: self._name.encode()}
        job.request = wire.encode(request)
        return self._runner(job)

    def run(self, request: wire.Request) -> None:
        self.start(request).future.result(120)


@pytest.fixture
def runner(engine_of: Callable[..., Engine], redis: Redis) -> Iterator[InferenceRunner]:
    runner = InferenceRunner(engine_of("demo"), "demo", TokenPublisher(redis))
    yield runner
    runner.close()


def generate(**options: Any) -> wire.Generate:
    return wire.Generate(**{"model": "demo", "prompt": "def", "max_tokens": 40} | options)


def score() -> wire.Score:
    return wire.Score(model="demo", items=[wire.ScoreItem(prompt="def", completion=" add")])


def test_jobs_of_all_kinds_end_while_another_tenants_grammars_are_compiled(runner: InferenceRunner):
    mallory, bob = Tenant(runner, "mallory"), Tenant(runner, "bob")
    bombs = [mallory.start(generate(json_schema=compile_bomb(number))) for number in range(NUM_BOMBS)]
    bombs += [mallory.start(generate(json_schema={"type": "integer", "multipleOf": 999_983 + n})) for n in range(3)]

    for number in range(4):
        bob.run(score())
        bob.run(generate())
        bob.run(generate(json_schema=SMALL))
        bob.run(generate(json_schema=SMALL | {"title": f"one that is not compiled yet: {number}"}))

    assert not all(bomb.future.done() for bomb in bombs)
    for bomb in bombs:
        bomb.cancel()


def test_jobs_of_all_kinds_end_beside_a_tenant_whose_every_token_is_expensive(runner: InferenceRunner):
    mallory, bob = Tenant(runner, "mallory"), Tenant(runner, "bob")
    bombs = [mallory.start(generate(json_schema=step_bomb(number), max_tokens=2000)) for number in range(6)]

    for _ in range(4):
        bob.run(score())
        bob.run(generate(max_tokens=8))
        bob.run(generate(json_schema={"enum": [1, 2]}))

    assert not all(bomb.future.done() for bomb in bombs)
    for bomb in bombs:
        bomb.cancel()


def test_two_tenants_that_attack_in_turn_hold_up_no_third(runner: InferenceRunner):
    attackers, bob = [Tenant(runner, name) for name in ("mallory", "eve")], Tenant(runner, "bob")
    bombs: list[AsyncResult] = []

    for number in range(6):
        bombs += [attacker.start(generate(json_schema=compile_bomb(number))) for attacker in attackers]
        bob.run(generate(json_schema=SMALL | {"title": str(number)}))

    assert not all(bomb.future.done() for bomb in bombs)
    for bomb in bombs:
        bomb.cancel()


def test_many_completions_of_one_schema_are_compiled_once(runner: InferenceRunner):
    compiler = runner.engine.chat.grammar_compiler
    before = compiler.grammars._num_runs
    Tenant(runner, "bob").run(generate(json_schema={"enum": ["fox"]}, n=128, max_tokens=8))
    assert compiler.grammars._num_runs == before + 1
