"""What a caller adds to the logits that a token is sampled from: biases of single tokens, penalties of repeated ones.

Pure. Sampling alone sees these logits; every reported logprob is of the model's own.
"""

from collections import Counter

import mlx.core as mx

from engine.sequence import Sequence


def steer(logits: mx.array, sequences: list[Sequence]) -> mx.array:
    """logits [rows, vocab] float32, one generating sequence a row. Rows that ask for nothing keep their values."""
    for row, sequence in enumerate(sequences):
        if sequence.sampling is not None and sequence.sampling.moves_logits:
            logits[row] = _steered(logits[row], sequence)
    return logits


def _steered(logits: mx.array, sequence: Sequence) -> mx.array:
    """[vocab]. As vLLM: the repetition penalty knows the prompt, the two others only what was generated."""
    sampling = sequence.sampling
    assert sampling is not None
    if sampling.repetition_penalty != 1:
        seen = mx.array(sorted(set(sequence.token_ids)))
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = mx.where(values > 0, values / penalty, values * penalty)
    counts = Counter(sequence.token_ids[sequence.num_given :])
    if counts and (sampling.presence_penalty or sampling.frequency_penalty):
        logits[mx.array(list(counts))] -= sampling.presence_penalty + sampling.frequency_penalty * mx.array(
            list(counts.values())
        )
    if sampling.logit_bias:
        biased, by = zip(*sampling.logit_bias, strict=True)
        logits[mx.array(biased)] += mx.array(by)
    return logits
