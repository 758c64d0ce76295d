"""What a row may ask for. Runs in the caller's thread, before the row waits for anything."""

from math import inf, isfinite

from scorepool.engine.errors import Refused, TooLong
from scorepool.engine.model_info import Facts
from scorepool.engine.sequence import Sampling, Sequence


def check(sequences: list[Sequence], facts: Facts) -> None:
    """Raises Refused or TooLong with a sentence that names the row, the value and what would be right."""
    if not sequences:
        raise Refused("the group has no rows; give at least one")
    if len(set(sequences)) != len(sequences):
        raise Refused("the group holds the same row twice; make one Sequence a row")
    for number, sequence in enumerate(sequences):
        where = f"row {number}" if len(sequences) > 1 else "the row"
        _check_tokens(sequence, where, facts)
        _check_report(sequence, where, facts)
        if sequence.sampling is not None:
            _check_sampling(sequence.sampling, where, facts)
        _check_length(sequence, where, facts)


def _check_tokens(sequence: Sequence, where: str, facts: Facts) -> None:
    if sequence.num_computed or sequence.logprobs or len(sequence.token_ids) != sequence.num_given:
        raise Refused(f"{where} was run before; make a new Sequence")
    if not sequence.token_ids:
        raise Refused(f"{where} has no tokens; give at least one (BOS where there is nothing else)")
    lowest, highest = min(sequence.token_ids), max(sequence.token_ids)
    if lowest < 0 or highest >= facts.vocab_size:
        bad = lowest if lowest < 0 else highest
        position = sequence.token_ids.index(bad)
        raise Refused(
            f"{where} has token id {bad} at position {position}; "
            f"this model's vocabulary goes from 0 to {facts.vocab_size - 1}"
        )


def _check_report(sequence: Sequence, where: str, facts: Facts) -> None:
    if sequence.score_from is None and sequence.sampling is None:
        raise Refused(f"{where} asks for nothing; set score_from, sampling or both")
    if sequence.score_from is not None and not 0 <= sequence.score_from <= sequence.num_given:
        raise Refused(f"{where} has score_from {sequence.score_from}; from 0 to {sequence.num_given} is right")
    if not 0 <= sequence.top_logprobs <= facts.vocab_size:
        raise Refused(f"{where} has top_logprobs {sequence.top_logprobs}; from 0 to {facts.vocab_size} is right")
    if not 0 < sequence.temperature < inf:
        raise Refused(f"{where} is scored at temperature {sequence.temperature}; a number above 0 is right")


def _check_sampling(sampling: Sampling, where: str, facts: Facts) -> None:
    limits = {
        "max_tokens at least 1": sampling.max_tokens >= 1,
        "temperature 0 or more, and finite": 0 <= sampling.temperature < inf,
        "top_p above 0 and up to 1": 0 < sampling.top_p <= 1,
        "top_k 0 or more": sampling.top_k >= 0,
        "min_p from 0 to 1": 0 <= sampling.min_p <= 1,
        "seed from 0 to 2**64 - 1": sampling.seed is None or 0 <= sampling.seed < 2**64,
        "presence_penalty that is finite": isfinite(sampling.presence_penalty),
        "frequency_penalty that is finite": isfinite(sampling.frequency_penalty),
        "repetition_penalty above 0, and finite": 0 < sampling.repetition_penalty < inf,
        f"logit_bias of finite numbers for token ids from 0 to {facts.vocab_size - 1}": all(
            0 <= token_id < facts.vocab_size and isfinite(bias) for token_id, bias in sampling.logit_bias
        ),
        "stop strings that are not empty": all(sampling.stop),
        f"stop_token_ids from 0 to {facts.vocab_size - 1}": all(
            0 <= token_id < facts.vocab_size for token_id in sampling.stop_token_ids
        ),
        f"min_tokens from 0 to max_tokens, {sampling.max_tokens}": 0 <= sampling.min_tokens <= sampling.max_tokens,
    }
    for right, is_met in limits.items():
        if not is_met:
            name = right.split()[0]
            raise Refused(f"{where} has sampling {name} {getattr(sampling, name)!r:.80}; it needs {right}")


def _check_length(sequence: Sequence, where: str, facts: Facts) -> None:
    num_more = sequence.max_length - sequence.num_given
    limits = {
        "this model's context is": facts.context_length,
        "the memory of this worker holds a KV cache of": facts.max_cached_tokens,
    }
    for limit, num_tokens in limits.items():
        if sequence.max_length > num_tokens:
            raise TooLong(
                f"{where} has {sequence.num_given} tokens and may generate {num_more} more; "
                f"{limit} {num_tokens} tokens, prompt and completion together"
            )
