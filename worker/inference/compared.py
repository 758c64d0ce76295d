"""Compare a model with its base: sequences from the base's result, and the divergence of their distributions. Pure.

p is the base's distribution at a token, q the model's, T the base's K most likely tokens. The model reports q of T, and
its least likely token. With P = 1 - sum of p over T and Q = 1 - sum of q over T, the mass of the other tokens,

    KL(p || q) = sum over T of p ln(p / q)  +  R,        R = sum over the others of p ln(p / q)

    P ln(P / Q)  <=  R  <=  P (ln p_K - ln q_min)

The left side is the log-sum inequality: of all ways to spread P and Q over the other tokens, the proportional one has
the least divergence. The right side holds for each of these tokens alone: none is more likely under p than the last of
T, p <= p_K, and none is less likely under q than the least likely token of all, q >= q_min. So
p ln(p / q) <= p (ln p_K - ln q_min), and these p sum to P. Where T is the whole vocabulary, P is 0 and both are equal.

The sums are made in float64 from float32 logprobs, and clamped logprobs (-9999) count as such.
"""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items
from itertools import accumulate, pairwise
from math import exp, fsum, log, sqrt
from operator import mul, sub

from msgspec import Struct

from scorepool import wire
from scorepool.engine import Sequence, Targets
from scorepool.wire import Floats
from scorepool.wire.packed import unpack_ints
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.text_lengths import Steps
from scorepool.worker.rq.errors import JobError

MIN_LOGPROB = -9999.0
LEAST_MASS = 2.0**-24  # of the model's other tokens: what rounding leaves of it may be 0


class BaseSequence(Struct, frozen=True):
    """What the base computed of one sequence. The columns have one row per reported token."""

    token_ids: list[int]  # from the first token of the prompt on
    num_prompt_tokens: int
    is_prompt_text: bool
    bos_added: bool
    logprobs: Floats
    top_ids: "array[int]"
    top_logprobs: Floats
    num_top: int
    ranks: list[int | None] | None = None

    @property
    def first(self) -> int:
        """The position of the first token that is compared: the first one of all has no distribution."""
        return max(1, len(self.token_ids) - len(self.logprobs))

    @property
    def num_skipped(self) -> int:
        """Reported tokens that are not compared."""
        return len(self.logprobs) - (len(self.token_ids) - self.first)

    def row(self, entry: int) -> slice:
        return slice(entry * self.num_top, (entry + 1) * self.num_top)


def read_base(request: wire.Compare, result: wire.Result) -> list[BaseSequence]:
    """Return what the base computed. Raises JobError if its result is not that of this job."""
    packed = result.packed
    if packed is None or packed.top_ids is None or packed.top_logprobs is None or packed.logprobs is None:
        raise _wrong_base(request, "has no packed columns")
    if len(result.sequences) != len(request.items) or len(packed.lengths) != len(request.items):
        raise _wrong_base(request, f"has {len(result.sequences)} sequences for {len(request.items)} items")
    token_ids, top_ids = _ints(packed.token_ids), _ints(packed.top_ids)
    logprobs, top_logprobs = Floats.unpack(bytes(packed.logprobs)), Floats.unpack(bytes(packed.top_logprobs))
    ranks = None if packed.ranks is None else [rank or None for rank in _ints(packed.ranks)]
    found = []
    starts = pairwise(accumulate(packed.lengths, initial=0))
    for (start, stop), (prompt, _), one in zip(starts, request.pairs(), result.sequences, strict=True):
        ids = one.prompt_token_ids if isinstance(prompt, str) else prompt
        if ids is None:
            raise _wrong_base(request, "lacks the ids of a prompt")
        wide = slice(start * packed.num_top, stop * packed.num_top)
        found.append(
            BaseSequence(
                [*ids[: one.num_prompt_tokens], *token_ids[start:stop]],
                one.num_prompt_tokens,
                isinstance(prompt, str),
                one.bos_added,
                Floats(logprobs[start:stop]),
                top_ids[wide],
                Floats(top_logprobs[wide]),
                packed.num_top,
                None if ranks is None else ranks[start:stop],
            )
        )
    return found


def to_compared(request: wire.Compare, base: Items[BaseSequence], vocab_size: int) -> Steps[list[PreparedSequence]]:
    """Return the sequences that the model scores: the base's tokens, with the base's top tokens as targets."""
    prepared = []
    for index, one in enumerate(base):
        yield 0
        if (highest := max(one.top_ids, default=0)) >= vocab_size:
            found = f"{request.base!r} has a token {highest}, and {request.model!r} {vocab_size} tokens"
            message = f"base: {found}; expected models of one vocabulary"
            raise JobError(wire.Failure(code="invalid", message=message, field="base"))
        if one.first == len(one.token_ids):
            message = f"items[{index}]: the first token has no distribution to compare; give a prompt"
            raise JobError(wire.Failure(code="invalid", message=message, field=f"items[{index}]"))
        rows = range(one.num_skipped, len(one.logprobs))
        sequence = Sequence(
            token_ids=list(one.token_ids),
            score_from=one.first,
            top_logprobs=1,
            min_logprob=True,
            rank=request.rank,
            targets=Targets([one.top_ids[one.row(entry)] for entry in rows], is_shared=False),
            temperature=request.temperature,
        )
        prepared.append(PreparedSequence(sequence, one.num_prompt_tokens, one.is_prompt_text, one.bos_added))
    return prepared


class _Token(Struct, frozen=True):
    """Hold the comparison of one token."""

    kld_lower: float
    kld_upper: float
    same_top: bool
    delta_p: float


def compare_models(
    base: Items[BaseSequence], prepared: Items[PreparedSequence], stamp: wire.Provenance, job_id: str, vocab_size: int
) -> wire.ModelComparison:
    """Compare what the model computed with what the base did. Raises ValueError if the columns do not match."""
    num_top = base[0].num_top
    is_exact = num_top == vocab_size
    sequences, tokens = [], []
    differences: list[float] = []
    for one, each in zip(base, prepared, strict=True):
        own = list(_tokens(one, each.sequence, is_exact))
        pairs = zip(_clamped(each.sequence.columns.logprobs), one.logprobs[one.num_skipped :], strict=True)
        differences += [mine - theirs for mine, theirs in pairs]
        tokens += own
        nothing = [None] * one.num_skipped
        sequences.append(
            wire.ComparedSequence(
                base_logprobs=one.logprobs,
                kld_lower=Floats([*nothing, *(token.kld_lower for token in own)]),
                kld_upper=Floats([*nothing, *(token.kld_upper for token in own)]),
                same_top=[*nothing, *(token.same_top for token in own)],
                base_ranks=one.ranks,
            )
        )
    return wire.ModelComparison(
        base=stamp,
        base_job_id=job_id,
        num_tokens=len(tokens),
        num_top=num_top,
        is_exact=is_exact,
        kld_lower=wire.divergence([token.kld_lower for token in tokens]),
        kld_upper=wire.divergence([token.kld_upper for token in tokens]),
        same_top_p=sum(token.same_top for token in tokens) / len(tokens),
        mean_delta_p=fsum(token.delta_p for token in tokens) / len(tokens),
        rms_delta_p=sqrt(fsum(token.delta_p**2 for token in tokens) / len(tokens)),
        logprob_sum_difference=fsum(differences),
        sequences=sequences,
    )


def _tokens(base: BaseSequence, sequence: Sequence, is_exact: bool) -> Iterator[_Token]:
    columns = sequence.columns
    rows = zip(
        base.logprobs[base.num_skipped :],
        _clamped(columns.logprobs),
        columns.target_logprobs,
        columns.top_ids,
        _clamped(columns.min_logprobs),
        strict=True,
    )
    for entry, (theirs, mine, targets, top_ids, lowest) in enumerate(rows, base.num_skipped):
        row = base.row(entry)
        lower, upper = kld_bounds(base.top_logprobs[row], _clamped(targets), lowest, is_exact)
        yield _Token(lower, upper, base.top_ids[row.start] == top_ids[0], exp(mine) - exp(theirs))


def kld_bounds(log_p: Items[float], log_q: Items[float], log_q_min: float, is_exact: bool) -> tuple[float, float]:
    """Return the least and the greatest KL(p || q), given the logprobs of the tokens that p finds most likely."""
    p = list(map(exp, log_p))
    head = fsum(map(mul, p, map(sub, log_p, log_q)))
    rest_p = 0.0 if is_exact else max(0.0, 1.0 - fsum(p))
    if rest_p == 0.0:
        return head, head
    rest_q = max(LEAST_MASS, 1.0 - fsum(map(exp, log_q)))
    return head + rest_p * log(rest_p / rest_q), head + rest_p * max(0.0, log_p[-1] - log_q_min)


def _clamped(values: Items[float | None]) -> list[float]:
    return [MIN_LOGPROB if value is None or value < MIN_LOGPROB else value for value in values]


def _ints(packed: bytes | bytearray) -> "array[int]":
    return array("i", unpack_ints(packed))


def _wrong_base(request: wire.Compare, what: str) -> JobError:
    return JobError(wire.Failure(code="internal", message=f"the result of the base {request.base!r} {what}"))
