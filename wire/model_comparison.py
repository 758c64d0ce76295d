"""Summarise the divergence of two models, and join the comparisons of several jobs. Pure."""

from collections.abc import Sequence
from math import fsum, isnan, sqrt

from scorepool.wire.compared import Divergence, ModelComparison
from scorepool.wire.comparison import join_stamps


def divergence(values: Sequence[float]) -> Divergence:
    """Summarise the divergences of tokens. Quantiles are interpolated between neighbours."""
    ordered = sorted(values)
    return Divergence(
        mean=fsum(ordered) / len(ordered),
        median=_quantile(ordered, 0.5),
        p99=_quantile(ordered, 0.99),
        max=ordered[-1],
    )


def join_comparisons(comparisons: Sequence[ModelComparison]) -> ModelComparison:
    """Return one comparison with the tokens of all, which are of the same models. `base_job_id` is the first one's."""
    first = comparisons[0]
    if len(comparisons) == 1:
        return first
    num_tokens = sum(one.num_tokens for one in comparisons)
    sequences = [sequence for one in comparisons for sequence in one.sequences]
    lower, upper = (
        divergence([value for sequence in sequences for value in getattr(sequence, name) if not isnan(value)])
        for name in ("kld_lower", "kld_upper")
    )
    return ModelComparison(
        base=join_stamps([one.base for one in comparisons]),
        base_job_id=first.base_job_id,
        num_tokens=num_tokens,
        num_top=first.num_top,
        is_exact=first.is_exact,
        kld_lower=lower,
        kld_upper=upper,
        same_top_p=fsum(one.same_top_p * one.num_tokens for one in comparisons) / num_tokens,
        mean_delta_p=fsum(one.mean_delta_p * one.num_tokens for one in comparisons) / num_tokens,
        rms_delta_p=sqrt(fsum(one.rms_delta_p**2 * one.num_tokens for one in comparisons) / num_tokens),
        logprob_sum_difference=fsum(one.logprob_sum_difference for one in comparisons),
        sequences=sequences,
    )


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
