"""Render what workers' engines compute, added up or averaged for each model and host.

A worker's name may change with every start, so it is no label.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric

from scorepool import wire

Loads = Mapping[tuple[str, str], Sequence[wire.EngineLoad]]  # by model and host
Measure = Callable[[Sequence[wire.EngineLoad]], float | None]


def engine_gauges(loads: Loads) -> Iterable[Metric]:
    """Yield the gauges. An engine that has no value of a measure yet, or ran no step lately, has none."""
    tokens = GaugeMetricFamily(
        "scorepool_engine_tokens_per_second",
        "Tokens of the last 15 s: given ones computed (prompt) or reused (cached), scored ones, generated ones.",
        labels=["model", "host", "kind"],
    )
    for (model, host), each in loads.items():
        if rates := _rates(each):
            for kind in ("prompt", "cached", "scored", "generated"):
                tokens.add_metric([model, host, kind], sum(getattr(one, f"{kind}_tokens_per_s") for one in rates))
    yield tokens
    yield _gauge(
        "scorepool_engine_steps_per_second",
        "Steps of the engine.",
        loads,
        lambda each: _sum(r.steps_per_s for r in _rates(each)),
    )
    yield _gauge(
        "scorepool_engine_busy_ratio", "Share of the time in which a step ran.", loads, _mean(lambda rates: rates.busy)
    )
    yield _gauge("scorepool_engine_step_seconds", "Mean time of a step.", loads, _mean(lambda rates: rates.step_s))
    yield _gauge(
        "scorepool_engine_step_rows", "Mean sequences in a step.", loads, _mean(lambda rates: rates.rows_per_step)
    )
    yield _gauge(
        "scorepool_engine_batch_fill_ratio",
        "How full a step was on average.",
        loads,
        _mean(lambda rates: rates.batch_fill),
    )
    yield _gauge(
        "scorepool_engine_acceptance_ratio",
        "Share of the proposed tokens of speculation that were accepted.",
        loads,
        _mean(lambda rates: rates.acceptance),
    )
    yield _gauge(
        "scorepool_engine_kv_cache_ratio",
        "Share of the KV caches that fit into memory, which sequences hold between steps.",
        loads,
        lambda each: _ratio(sum(one.cached_tokens for one in each), sum(one.max_cached_tokens for one in each)),
    )
    yield _gauge(
        "scorepool_engine_budget_ratio",
        "Least share of its budget that a worker may use.",
        loads,
        lambda each: min(w.budget for w in each),
    )
    yield _gauge(
        "scorepool_engine_loaded_workers",
        "Workers whose weights are in memory; an idle one may have dropped them.",
        loads,
        lambda each: sum(one.is_loaded for one in each),
    )
    strained = GaugeMetricFamily(
        "scorepool_engine_strained",
        "Workers whose budget heat, low memory or battery lowers.",
        labels=["model", "host", "reason"],
    )
    for (model, host), each in loads.items():
        for reason in get_args(wire.Strain):
            strained.add_metric([model, host, reason], sum(reason in one.strains for one in each))
    yield strained
    stored = GaugeMetricFamily(
        "scorepool_engine_prefix_cache_bytes",
        "KV caches of shared prompts: in the workers' memory, and in the files of their machine.",
        labels=["model", "host", "tier"],
    )
    for (model, host), each in loads.items():
        stored.add_metric([model, host, "memory"], sum(one.prefix_bytes for one in each))
        stored.add_metric([model, host, "disk"], max(one.prefix_disk_bytes for one in each))
    yield stored
    yield _gauge(
        "scorepool_engine_prefix_cache_hit_ratio",
        "Share of given tokens that a shared prefix had computed.",
        loads,
        _hit_ratio,
    )


def _gauge(name: str, text: str, loads: Loads, measure: Measure) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["model", "host"])
    for labels, each in loads.items():
        value = measure(each)
        if value is not None:
            family.add_metric(labels, value)
    return family


def _rates(each: Iterable[wire.EngineLoad]) -> list[wire.EngineRates]:
    return [one.rates for one in each if one.rates is not None]


def _sum(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) if found else None


def _mean(of: Callable[[wire.EngineRates], float | None]) -> Measure:
    def measure(each: Sequence[wire.EngineLoad]) -> float | None:
        values = [value for rates in _rates(each) if (value := of(rates)) is not None]
        return sum(values) / len(values) if values else None

    return measure


def _hit_ratio(each: Sequence[wire.EngineLoad]) -> float | None:
    cached = sum(rates.cached_tokens_per_s for rates in _rates(each))
    return _ratio(cached, cached + sum(rates.prompt_tokens_per_s for rates in _rates(each)))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
