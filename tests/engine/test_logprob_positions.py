"""Known bugs that lose or move an entry are put into the engine, and the checks must fail.

Reviewers found these bugs in another engine: a window that begins one token late, chunks whose entries are dropped or
skipped after the first, one generating sequence that switches scoring off for all, and a cached prefix that drops the
position which predicts the first new token.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import wait
from random import Random

import pytest

from scorepool.engine import Engine, EngineError, EngineSettings, Sampling, Sequence
from scorepool.engine.scheduling.scheduler import Scheduler
from scorepool.engine.scheduling.slice import SchedulerOutput, Slice
from tests.engine.oracle import Oracle, assert_agrees
from tests.tiny_models import VOCAB_SIZE, TinyModels
from tests.tiny_tokenizer import BOS

PROMPT = [BOS] + [Random(4).randrange(3, VOCAB_SIZE) for _ in range(99)]
RIGHT = Slice.predictors.fget


def first_wanted(slice_: Slice) -> int:
    sequence = slice_.sequence
    return max(0, (sequence.num_input_tokens if sequence.score_from is None else sequence.score_from) - 1)


def one_late(slice_: Slice) -> range:
    return range(max(slice_.start, first_wanted(slice_) + 1), slice_.end)


def last_chunk_alone(slice_: Slice) -> range:
    return RIGHT(slice_) if slice_.completes_prefill else range(0)


def first_chunk_alone(slice_: Slice) -> range:
    return RIGHT(slice_) if first_wanted(slice_) >= slice_.start else range(0)


def all_or_none(slice_: Slice) -> range:
    beside = getattr(all_or_none, "slices", [])
    is_plain = any(other.sequence.score_from is None for other in beside)
    return range(slice_.end - 1, slice_.end) if is_plain else RIGHT(slice_)


def after_a_border(slice_: Slice) -> range:
    """Drop the first predictor of a slice that continues from a cached prefix."""
    return range(max(slice_.start, first_wanted(slice_) + (slice_.start > 0)), slice_.end)


def scored(length: int, score_from: int) -> Sequence:
    draw = Random(length)
    return Sequence(token_ids=[BOS] + [draw.randrange(3, VOCAB_SIZE) for _ in range(length - 1)], score_from=score_from)


def make_sequences() -> list[Sequence]:
    """Make a generating sequence, a one-token prompt, and windows that begin at, before and after chunk borders."""
    plain = Sequence(token_ids=[BOS, 9], sampling=Sampling(max_tokens=3, seed=1))
    windows = [(3, 1), (5, 4), (80, 0), (80, 17), (70, 33), (70, 69), (66, 2)]
    return [plain, *(scored(length, score_from) for length, score_from in windows)]


@pytest.fixture
def engine(tiny_models: TinyModels) -> Iterator[Engine]:
    """An engine that a test may break."""
    engine = Engine(EngineSettings(model=str(tiny_models("llama")), max_batch_tokens=32))
    yield engine
    engine.close()


def assert_every_entry_is_there(engine: Engine, oracle: Oracle, timeout_s: float = 60) -> None:
    sequences = make_sequences()
    wait([engine.add([sequence]) for sequence in sequences], timeout_s)
    for sequence in sequences:
        assert_agrees(sequence, oracle)


def test_windows_in_chunks_beside_a_generating_sequence_are_complete(engine: Engine, oracle: Oracle):
    assert_every_entry_is_there(engine, oracle)


@pytest.mark.parametrize("bug", [one_late, last_chunk_alone, first_chunk_alone, all_or_none, after_a_border])
def test_each_known_bug_is_found(
    engine: Engine, oracle: Oracle, bug: Callable[[Slice], range], monkeypatch: pytest.MonkeyPatch
):
    def schedule(scheduler: Scheduler) -> SchedulerOutput:
        output = right_schedule(scheduler)
        all_or_none.slices = [slice_ for slice_ in output.slices if not slice_.is_decode]
        return output

    right_schedule = Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", schedule)
    monkeypatch.setattr(Slice, "predictors", property(bug))

    with pytest.raises((AssertionError, EngineError)):
        assert_every_entry_is_there(engine, oracle, timeout_s=1)  # some sequences never end


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "granitehybrid", "mamba2"])
@pytest.mark.parametrize("together", [True, False])
def test_a_shared_prompt_keeps_the_entry_that_its_last_token_predicts(
    engine_of: Callable[..., Engine], oracle_of: Callable[[str], Oracle], name: str, together: bool
):
    """Score completions of one prompt one after the other and at once: a cache hit must keep the predictor."""
    engine = engine_of(name)
    completions = [[7], [7, 8, 9], [30, 31], [7, 8, 40, 41, 42], []]
    sequences = [
        Sequence(token_ids=PROMPT + completion, score_from=100, top_logprobs=3, rank=True) for completion in completions
    ]
    sequences.append(Sequence(token_ids=[*PROMPT, 7, 8], score_from=0))
    sequences.append(Sequence(token_ids=list(PROMPT), sampling=Sampling(max_tokens=4, temperature=0)))

    for group in [sequences] if together else [[sequence] for sequence in sequences]:
        engine.add(group).result(60)

    for sequence in sequences:
        assert_agrees(sequence, oracle_of(name))
