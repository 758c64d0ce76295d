"""Proposed tokens change nothing but the time: ids, logprobs and ends are those of a run without them."""

from collections.abc import Callable, Iterable
from functools import cache
from random import Random
from threading import Event

import numpy as np
import pytest

from scorepool.engine import ChatCodec, Engine, EngineSettings, Sampling, Sequence, Tokenizer, core
from scorepool.engine.sampling import next_token
from scorepool.engine.scheduling.proposals import Proposal, ProposalSource
from scorepool.engine.scheduling.slice import SliceResult
from scorepool.engine.text.chat.grammar import StructuredOutputSpec
from scorepool.engine.text.chat.grammar_compiler import GrammarCompiler
from tests.engine.oracle import Oracle, assert_agrees, filter_as_transformers
from tests.engine.test_late_constraints import generating
from tests.tiny_tokenizer import BOS, EOS, build_tokenizer

PAIRS = tuple((first, second) for first in range(3, 200) for second in range(3 + first % 2, 200, 2))
FAMILIES = ["llama", "gpt2", "qwen3_moe", "gemma3", "gpt_oss", "mamba", "qwen3_next", "gpt_bigcode"]
SCHEMA = {
    "type": "array",
    "minItems": 3,
    "items": {"type": "object", "properties": {"name": {"enum": ["dog", "fox"]}, "age": {"type": "integer"}}},
}
FORMS = (StructuredOutputSpec(json_schema=SCHEMA), StructuredOutputSpec(regex="(the (quick|lazy) (dog|fox) )+"))


class ScriptedSpeculator:
    """Proposes what a plain run has generated, of random lengths and with random errors."""

    def __init__(
        self, source: ProposalSource, max_width: int, max_proposed: Callable[[int], int], usual: str = "ngram"
    ) -> None:
        self.max_width, self.max_proposed = max_width, max_proposed
        self.script: dict[tuple[int, ...], list[int]] = {}  # by prompt and seed: the tokens of a plain run
        self.draw = Random(0)
        self.accepted: list[int] = []

    def record_cost(self, num_tokens: int, seconds: float) -> None:
        assert seconds > 0

    def may_propose(self, decoding: list[Sequence], max_tokens: int) -> bool:
        return self.draw.random() < 0.9

    def propose(self, decoding: list[Sequence], max_tokens: int) -> list[Proposal]:
        return [Proposal(self._propose(sequence)) for sequence in decoding]

    def _propose(self, sequence: Sequence) -> tuple[int, ...]:
        start = sequence.num_computed + 1
        assert len(sequence.token_ids) == start
        room = min(self.max_proposed(start - 1), sequence.max_length - start - 1)
        right = self.script.get(key_of(sequence), [])[
            start : start + min(room, self.draw.randrange(self.max_width + 1))
        ]
        return tuple(token if self.draw.random() < 0.8 else (token + 1) % 500 for token in right)

    def observe(self, results: Iterable[SliceResult]) -> None:
        self.accepted += [one.num_accepted - 1 for one in results if one.slice.proposed_ids]

    def forget(self, sequences: Iterable[Sequence]) -> None:
        pass


def key_of(sequence: Sequence) -> tuple[int, ...]:
    return (sequence.noise_seed, *sequence.token_ids[: sequence.num_input_tokens])


def prompt(length: int, seed: int) -> list[int]:
    draw = Random(seed)
    return [BOS, *(draw.randrange(3, 500) for _ in range(length - 1))]


@cache
def grammars() -> GrammarCompiler:
    return ChatCodec(Tokenizer(build_tokenizer(), [EOS])).grammar_compiler


def rows(max_tokens: int = 24) -> list[Sequence]:
    """Make rows of every kind beside each other; two calls make equal ones. The last ones follow grammars."""

    def row(seed: int, length: int, **options: object) -> Sequence:
        report = {name: options.pop(name) for name in ("score_from", "processed", "rank") if name in options}
        limits = {"max_tokens": max_tokens, "seed": seed, "ignore_eos": True}
        return Sequence(token_ids=prompt(length, seed), top_logprobs=2, sampling=Sampling(**limits | options), **report)

    return [
        row(1, 5, temperature=0),
        row(2, 17, temperature=0, max_tokens=9, rank=True),
        row(12, 8, temperature=0.5, stop=(b"the", b"a", b"\xc3"), include_stop=True),
        row(13, 4, temperature=0, logit_bias=((9, 4.0), (200, 3.0), (17, -3.0)), min_p=0.1),
        row(3, 9, score_from=2),
        row(4, 30, temperature=0.7, top_k=20, processed=True),
        row(5, 6, temperature=0, frequency_penalty=0.5, presence_penalty=0.3, repetition_penalty=1.2),
        row(9, 7, temperature=0, bad_words=PAIRS, allowed_bitmask=(2**200 - 8).to_bytes(28, "little")),
        row(6, 3, min_tokens=6, stop_token_ids=tuple(range(3, 250)), ignore_eos=False),
        *(row(seed, 12) for seed in (7, 7)),  # two of one prompt, n > 1
        Sequence(token_ids=prompt(40, 8), score_from=1, entropy=True),
        *(
            constrained(row(seed, 8 * seed - 75, temperature=seed - 10, ignore_eos=False), seed - 10)
            for seed in (10, 11)
        ),
    ]


def constrained(sequence: Sequence, form: int) -> Sequence:
    """Let a row follow a grammar, however long its process takes for a step."""
    sequence.constraint = grammars().constraints(FORMS[form], None)[0]
    return sequence


@pytest.fixture
def speculate(
    folder_of: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> Iterable[Callable[..., ScriptedSpeculator]]:
    """Open an engine whose proposals are scripted by what the given rows have generated; run others on it.

    A row is canceled beside them.
    """
    engines: list[Engine] = []
    for name in ("PATIENCE_S", "HELD_UP_S"):  # a row whose grammar is late proposes nothing
        monkeypatch.setattr(next_token, name, 10.0)

    def run(name: str, scripts: list[Sequence], rows: list[Sequence], **settings: str) -> ScriptedSpeculator:
        made: list[ScriptedSpeculator] = []
        left = Event()

        def make(*arguments: object) -> ScriptedSpeculator:
            made.append(ScriptedSpeculator(*arguments))
            return made[-1]

        monkeypatch.setattr(core, "Speculator", make)
        engines.append(Engine(EngineSettings(model=str(folder_of(name)), speculation="ngram", **settings)))
        made[0].script = {key_of(sequence): list(sequence.token_ids) for sequence in scripts}
        canceled = Sequence(token_ids=[BOS, 9], sampling=Sampling(max_tokens=90, ignore_eos=True))
        leaves = engines[-1].add([canceled], on_step=lambda _: canceled.num_generated >= 5 and left.set())
        futures = [engines[-1].add([sequence]) for sequence in rows]
        left.wait(60)
        engines[-1].cancel(leaves)
        for future in futures:
            future.result(120)
        return made[0]

    yield run
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_with_proposals_have_the_tokens_of_a_plain_run_and_the_logprobs_of_transformers(
    name: str,
    engine_of: Callable[..., Engine],
    oracle_of: Callable[[str], Oracle],
    speculate: Callable[..., ScriptedSpeculator],
):
    plain, verified = rows(), rows()
    for future in [engine_of(name).add([sequence]) for sequence in plain]:
        future.result(60)

    speculator = speculate(name, plain, verified)

    for one, other in zip(plain, verified, strict=True):
        assert other.token_ids == one.token_ids
        assert (other.finish_reason, other.stop_reason, other.text_bytes) == (
            one.finish_reason,
            one.stop_reason,
            one.text_bytes,
        )
        assert len(other.columns.sampled_logprobs) == other.num_generated
        assert other.columns.sampled_logprobs == pytest.approx(one.columns.sampled_logprobs, abs=1e-4)
        assert_agrees(other, oracle_of(name))
    assert verified[0].token_ids[5:] == oracle_of(name).greedy(verified[0].token_ids, 5)
    assert {0, 1, 2, 3} < set(speculator.accepted)
    assert sum(other.num_accepted for other in verified if other.constraint is not None)


@pytest.mark.parametrize("name", ["llama", "gemma3", pytest.param("mamba", marks=pytest.mark.soak)])
def test_exact_mode_has_the_same_bits_with_proposals(
    name: str, engine_of: Callable[..., Engine], speculate: Callable[..., ScriptedSpeculator]
):
    plain, verified = ([made[index] for index in (0, 4, 6, -1)] for made in (rows(70), rows(70)))
    for future in [engine_of(name, mode="exact").add([sequence]) for sequence in plain]:
        future.result(60)

    speculator = speculate(name, plain, verified, mode="exact")

    for one, other in zip(plain, verified, strict=True):
        assert (other.token_ids, other.columns, other.text_bytes) == (one.token_ids, one.columns, one.text_bytes)
    assert {0, 1, 2, 3} < set(speculator.accepted)


@pytest.mark.usefixtures("unmeasured_steps")
def test_repetition_is_proposed_and_takes_fewer_steps(
    folder_of: Callable[[str], object], open_engine: Callable[..., Engine], oracle_of: Callable[[str], Oracle]
):
    plain, engine = (open_engine(folder_of("llama"), speculation=method) for method in ("off", "ngram"))
    bias = tuple((token, 40.0) for token in (7, 8, 9))  # a random model that repeats itself before long
    sampling = Sampling(max_tokens=120, temperature=0, ignore_eos=True, logit_bias=bias)
    sequences = [[Sequence(token_ids=[BOS, 7, 8, 9, number], sampling=sampling) for number in (7, 8)] for _ in range(2)]

    for opened, group in zip((plain, engine), sequences, strict=True):
        opened.add(group).result(60)

    for one, other in zip(*sequences, strict=True):
        assert other.token_ids == one.token_ids
        assert_agrees(other, oracle_of("llama"))
    stats = engine.stats
    assert stats.generated_tokens == plain.stats.generated_tokens == 240
    assert 0 < stats.accepted_tokens <= stats.proposed_tokens
    assert stats.steps < plain.stats.steps * 0.6
    assert (plain.model_info.speculation, engine.model_info.speculation) == ("off", "ngram")


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next", "gpt_bigcode"])
def test_late_constraints_beside_proposals_change_no_row(
    name: str,
    engine_of: Callable[..., Engine],
    oracle_of: Callable[[str], Oracle],
    speculate: Callable[..., ScriptedSpeculator],
):
    def late(most_calls: int) -> list[Sequence]:
        return [generating(seed, most_calls, num_given=3 + seed, top_logprobs=2) for seed in range(3)]

    plain, verified = [*late(0), *rows()], [*late(4), *rows()]
    for future in [engine_of(name).add([sequence]) for sequence in plain]:
        future.result(60)

    speculate(name, plain, verified)

    for one, other in zip(plain, verified, strict=True):
        assert other.token_ids == one.token_ids
        assert_agrees(other, oracle_of(name))
    assert sum(sequence.num_accepted for sequence in verified[:3])
    assert sum(sequence.num_pauses for sequence in verified[:3])


def test_rows_that_all_pause_with_proposals_keep_the_tokens_before_them(
    engine_of: Callable[..., Engine], oracle_of: Callable[[str], Oracle], speculate: Callable[..., ScriptedSpeculator]
):
    def late(most_calls: int) -> list[Sequence]:
        return [generating(seed, most_calls, num_given=3 + seed, max_tokens=40) for seed in range(3)]

    plain, verified = late(0), late(4)
    for future in [engine_of("llama").add([sequence]) for sequence in plain]:
        future.result(60)

    speculate("llama", plain, verified)

    for one, other in zip(plain, verified, strict=True):
        assert other.token_ids == one.token_ids
        assert_agrees(other, oracle_of("llama"))
    assert all(sequence.num_accepted and sequence.num_pauses for sequence in verified)


def test_sampled_rows_with_proposals_have_the_distribution_of_the_model(
    oracle_of: Callable[[str], Oracle], engine_of: Callable[..., Engine], speculate: Callable[..., ScriptedSpeculator]
):
    def sampled(num_rows: int) -> list[Sequence]:
        sampling = [Sampling(max_tokens=4, seed=seed, top_k=6, ignore_eos=True) for seed in range(num_rows)]
        return [Sequence(token_ids=[BOS, 40, 41], sampling=one) for one in sampling]

    likely = Sequence(token_ids=[BOS, 40, 41], sampling=Sampling(max_tokens=4, temperature=0, ignore_eos=True))
    engine_of("llama").add([likely]).result(60)
    verified, scripts = sampled(400), sampled(400)
    for script in scripts:  # what is proposed does not depend on the noise, as with a draft model
        script.token_ids = list(likely.token_ids)
    speculator = speculate("llama", scripts, verified)

    prefix = likely.token_ids[:4]
    seconds = [sequence.token_ids[4] for sequence in verified if sequence.token_ids[:4] == prefix]
    row = filter_as_transformers(oracle_of("llama").logprobs(prefix)[-1], Sampling(max_tokens=1, top_k=6))
    expected = {token: len(seconds) * float(np.exp(row[token])) for token in np.flatnonzero(np.isfinite(row))}
    assert sum(speculator.accepted) > 50
    assert set(seconds) <= set(expected)
    chi_square = sum((seconds.count(token) - number) ** 2 / number for token, number in expected.items())
    assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001
