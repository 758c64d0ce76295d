"""A sequence has the same numbers alone and in any batch, in any chunking, with or without a shared prefix.

With a fast BLAS, whose kernels depend on the shape of a batch, "the same" means within TOLERANCE. With the BLAS of
MLX's wheel, and in exact mode with any BLAS, it means to the bit.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scorepool.engine import Engine, Sampling, Sequence
from scorepool.engine.model import products
from tests.tiny_models import VOCAB_SIZE
from tests.tiny_tokenizer import BOS

pytestmark = pytest.mark.timeout(300)  # hundreds of examples per test
EXAMPLES = int(os.environ.get("INVARIANCE_EXAMPLES", "200"))
TOLERANCE = 5e-5 if products._NAMES else 0.0
# Attention and experts; a state; a sliding window, whose buffers differ in size and therefore in the order of sums.
MODELS = ["llama", "qwen3_moe"] + (["granitehybrid", "gemma3"] if products._NAMES else [])
EXACT = ["llama", "qwen3_moe", "granitehybrid", "gemma3", "gpt_oss"]
BUDGETS = [(25, 2), (64, 32), (1000, 4), (8192, 32)]  # max_batch_tokens, max_running_rows
_draw = Random(2)
DOCUMENTS = [[BOS] + [_draw.randrange(3, VOCAB_SIZE) for _ in range(109)] for _ in range(2)]


@dataclass(frozen=True)
class SequenceSpec:
    """The inputs of a sequence, hashable, so that it can be made and run again."""

    token_ids: tuple[int, ...]
    score_from: int | None
    top_logprobs: int
    sampling: Sampling | None

    def make(self) -> Sequence:
        return Sequence(
            token_ids=list(self.token_ids),
            score_from=self.score_from,
            top_logprobs=self.top_logprobs,
            sampling=self.sampling,
        )


@st.composite
def sequence_specs(draw: st.DrawFn) -> SequenceSpec:
    """Draw the beginning of one of two documents, so that prefixes of any length are shared, and a suffix."""
    prefix = draw(st.sampled_from(DOCUMENTS))[: draw(st.integers(1, 24) | st.integers(90, 110))]
    suffix = draw(st.lists(st.integers(3, VOCAB_SIZE - 1), max_size=5))
    tokens = (*prefix, *suffix)
    generates = draw(st.booleans())
    sampling = Sampling(max_tokens=draw(st.integers(1, 4)), seed=draw(st.integers(0, 9))) if generates else None
    first = st.integers(0, len(tokens))
    return SequenceSpec(
        tokens, draw(st.none() | first if generates else first), draw(st.sampled_from([0, 3])), sampling
    )


batches = {
    "specs": st.lists(sequence_specs(), min_size=2, max_size=4),
    "budget": st.sampled_from(BUDGETS),
    "is_one_group": st.booleans(),
}


@pytest.fixture(scope="module")
def alone(engine_of: Callable[..., Engine]) -> Callable[..., Sequence]:
    """Run a sequence alone, without a prefix cache, once per module."""
    finished: dict[tuple[str, SequenceSpec, str], Sequence] = {}

    def run(name: str, spec: SequenceSpec, mode: str) -> Sequence:
        if (name, spec, mode) not in finished:
            finished[name, spec, mode] = spec.make()
            engine_of(name, mode=mode, prefix_cache_bytes=0).add([finished[name, spec, mode]]).result(60)
        return finished[name, spec, mode]

    return run


def run_together(engine: Engine, specs: list[SequenceSpec], is_one_group: bool) -> list[Sequence]:
    sequences = [spec.make() for spec in specs]
    groups = [sequences] if is_one_group else [[sequence] for sequence in sequences]
    for future in [engine.add(group) for group in groups]:
        future.result(60)
    return sequences


def assert_same(sequence: Sequence, expected: Sequence, tolerance: float) -> None:
    """Compare two sequences up to the first different token: rounding may sample another of two nearly equal tokens."""
    if tolerance == 0:
        assert sequence.token_ids == expected.token_ids
        assert (sequence.columns.logprobs, sequence.columns.top_ids) == (
            expected.columns.logprobs,
            expected.columns.top_ids,
        )
        assert sequence.columns.top_logprobs == expected.columns.top_logprobs
        return
    num_input_tokens = sequence.num_input_tokens
    new = zip(sequence.token_ids[num_input_tokens:], expected.token_ids[num_input_tokens:], strict=False)
    num_same = next(
        (index for index, (one, other) in enumerate(new) if one != other), len(sequence.token_ids) - num_input_tokens
    )
    num_entries = len(sequence.columns.logprobs) - sequence.num_generated + num_same
    for one, other in (
        (sequence.columns.logprobs, expected.columns.logprobs),
        (sequence.columns.top_logprobs, expected.columns.top_logprobs),
    ):
        np.testing.assert_allclose(flat(one[:num_entries]), flat(other[:num_entries]), rtol=0, atol=tolerance)


def flat(column: list[float | None] | list[list[float]]) -> list[float]:
    """Flatten a column; the None of a first token becomes NaN, which assert_allclose treats as equal."""
    return [np.nan if value is None else value for row in column for value in (row if isinstance(row, list) else [row])]


def assert_rescored_the_same(engine: Engine, sequence: Sequence, tolerance: float) -> None:
    rescored = Sequence(token_ids=list(sequence.token_ids), score_from=sequence.num_input_tokens)
    engine.add([rescored]).result(60)
    generated = sequence.columns.logprobs[len(sequence.columns.logprobs) - sequence.num_generated :]
    np.testing.assert_allclose(generated, rescored.columns.logprobs, rtol=0, atol=tolerance)


def assert_invariant(
    engine_of: Callable[..., Engine],
    alone: Callable[..., Sequence],
    name: str,
    specs: list[SequenceSpec],
    budget: tuple[int, int],
    is_one_group: bool,
    mode: str = "default",
) -> None:
    tolerance = TOLERANCE if mode == "default" else 0.0
    engine = engine_of(name, mode=mode, max_batch_tokens=budget[0], max_running_rows=budget[1])
    for spec, sequence in zip(specs, run_together(engine, specs, is_one_group), strict=True):
        assert_same(sequence, alone(name, spec, mode), tolerance)
        if sequence.sampling:
            assert_rescored_the_same(engine, sequence, 5e-5 if mode == "default" else 0.0)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(MODELS), **batches)
@pytest.mark.soak
def test_a_sequence_is_the_same_alone_and_in_any_batch(
    engine_of: Callable[..., Engine], alone: Callable[..., Sequence], **batch: object
):
    assert_invariant(engine_of, alone, **batch)


@pytest.mark.soak
@pytest.mark.timeout(0)
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(MODELS), mode=st.sampled_from(["default", "exact"]), **batches)
def test_a_sequence_is_the_same_in_ten_thousand_batches(
    engine_of: Callable[..., Engine], alone: Callable[..., Sequence], **batch: object
):
    assert_invariant(engine_of, alone, **batch)


@settings(
    max_examples=max(1, EXAMPLES // 4),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(name=st.sampled_from(EXACT), **batches)
def test_exact_mode_is_the_same_to_the_bit(
    engine_of: Callable[..., Engine], alone: Callable[..., Sequence], **batch: object
):
    assert_invariant(engine_of, alone, mode="exact", **batch)


@pytest.mark.soak
def test_the_wheels_blas_is_the_same_to_the_bit(root: Path):
    """Run in a new process in which no other BLAS is loaded."""
    test = "tests/engine/test_invariance.py::test_a_sequence_is_the_same_alone_and_in_any_batch"
    code = (
        "from scorepool.engine.model import products; products._NAMES = (); import pytest;"
        f"raise SystemExit(pytest.main([{test!r}, '-q']))"
    )

    completed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=os.environ | {"INVARIANCE_EXAMPLES": str(max(1, EXAMPLES // 5))},
        capture_output=True,
        text=True,
        check=False,
    )

    assert completed.returncode == 0, completed.stdout[-3000:]


def test_a_suffix_does_not_change_the_scores_before_it(engine_of: Callable[..., Engine]):
    engine = engine_of("llama")
    sequences = [Sequence(token_ids=[*DOCUMENTS[0], *suffix], score_from=1) for suffix in ([], [5], [7, 8, 9] * 20)]

    engine.add(sequences).result(60)

    for sequence in sequences[1:]:
        np.testing.assert_allclose(
            sequence.columns.logprobs[:109], sequences[0].columns.logprobs, rtol=0, atol=TOLERANCE
        )
