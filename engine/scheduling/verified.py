"""Keep account of the tokens that were proposed for a sequence: how many, and which of them are part of it.

A stop string may end in an accepted token and begin in an earlier one. Tokens that it cuts off are not part of the
sequence, whatever proposed them and whichever step has verified them.
"""

from scorepool.engine.scheduling.slice import SliceResult
from scorepool.engine.sequence import Sequence


def record(result: SliceResult) -> None:
    """Add the proposed tokens of a step that was read."""
    slice_, sequence = result.slice, result.slice.sequence
    num_proposed = len(slice_.proposed_ids)
    if not num_proposed:
        return
    first = slice_.end - num_proposed - sequence.num_input_tokens
    sequence.num_proposed += num_proposed
    sequence.accepted += range(first, first + num_proposed - result.num_rejected)
    if sequence.reports_proposals and result.error is None:
        sequence.proposals += result.proposals
    sequence.num_accepted = len(sequence.accepted)


def take_back_cut(sequence: Sequence) -> None:
    """Let no token count as accepted that a stop string has cut off."""
    end = sequence.num_generated
    if not sequence.accepted or sequence.accepted[-1] < end:
        return
    sequence.accepted = [number for number in sequence.accepted if number < end]
    sequence.num_accepted = len(sequence.accepted)
    sequence.proposals = [one._replace(accepted=one.accepted and one.position < end) for one in sequence.proposals]
