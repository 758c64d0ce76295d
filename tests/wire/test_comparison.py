"""Two computations of the same tokens are equal to the bit, within the tolerance of their mode, or differ."""

from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from scorepool import wire
from scorepool.wire import Floats, Provenance, ScoredSequence, compare, tolerance_nats

STAMP = Provenance(
    model="demo",
    fingerprint="f",
    dtype="float32",
    quantization=None,
    adapter=None,
    mode="default",
    backend="cpu",
    versions={"mlx": "1"},
)
EXACT = replace(STAMP, mode="exact")


def scored(logprobs: list[float | None], **columns: Any) -> ScoredSequence:
    first = 0 if logprobs[:1] == [None] else 2
    return ScoredSequence(
        token_ids=list(range(10, 10 + first + len(logprobs))), first=first, logprobs=Floats(logprobs), **columns
    )


@pytest.mark.parametrize(
    ("one", "other", "temperature", "expected"),
    [
        (STAMP, STAMP, 1.0, 1e-3),
        (STAMP, replace(STAMP, mode="one row at a time", backend="metal"), 1.0, 1e-3),
        (STAMP, STAMP, 0.5, 2e-3),
        (STAMP, STAMP, 2.0, 1e-3),
        (EXACT, EXACT, 1.0, 0.0),
        (EXACT, EXACT, 0.5, 0.0),
        (EXACT, replace(EXACT, model="alias"), 1.0, 0.0),
        (EXACT, STAMP, 1.0, 1e-3),
        (EXACT, replace(EXACT, backend="metal"), 1.0, 1e-3),
        (EXACT, replace(EXACT, versions={"mlx": "2"}), 1.0, 1e-3),
        (replace(STAMP, dtype="bfloat16"), replace(STAMP, dtype="float16"), 1.0, 0.8),
        (replace(EXACT, dtype="bfloat16"), replace(EXACT, dtype="bfloat16"), 1.0, 0.0),
    ],
)
def test_the_tolerance_follows_from_mode_dtype_backend_and_versions(
    one: Provenance, other: Provenance, temperature: float, expected: float
):
    assert tolerance_nats(one, other, temperature) == tolerance_nats(other, one, temperature) == expected


@pytest.mark.parametrize("field", ["fingerprint", "dtype", "quantization", "adapter"])
def test_results_of_other_weights_need_not_agree(field: str):
    other = replace(STAMP, **{field: "other"})
    assert not wire.are_of_one_model(STAMP, other)
    assert wire.stamp_differences(STAMP, other) == [f"{field} {getattr(STAMP, field)!r} and 'other'"]


def test_results_of_other_modes_backends_and_versions_must_agree_and_the_difference_is_named():
    other = replace(STAMP, model="alias", mode="exact", backend="metal", versions={"mlx": "2", "mlx-lm": "3"})
    assert wire.are_of_one_model(STAMP, other)
    assert wire.stamp_differences(STAMP, other) == [
        "mode 'default' and 'exact'",
        "backend 'cpu' and 'metal'",
        "version of mlx '1' and '2'",
        "version of mlx-lm None and '3'",
    ]


def test_equal_bits_are_equal():
    one = scored([None, -1.5, -9999.0], top_ids=[[], [3], [4]], top_logprobs=[Floats(), Floats([-1]), Floats([-2])])
    found = compare([one, one], [one, one], 0.0)
    assert (found.is_equal, found.num_tokens, found.num_different, found.largest) == (True, 6, 0, 0.0)
    assert found.first is None


def test_a_difference_within_the_tolerance_is_measured():
    found = compare([scored([-1.5, -2.0])], [scored([-1.5, -2.25])], 0.25)
    assert (found.is_equal, found.num_different, found.largest, found.first) == (False, 0, 0.25, None)


def test_the_first_token_that_differs_is_named():
    one = [scored([-1.0]), scored([-1.0, -2.0, -3.0, -4.0])]
    other = [scored([-1.0]), scored([-1.0, -2.0, -4.0, -9.0])]
    found = compare(one, other, 0.5)
    assert (found.num_tokens, found.num_different, found.largest) == (5, 2, 5.0)
    assert str(found.first) == "sequence 1, position 4, token 14: logprob -3 and -4"


def test_a_value_that_is_missing_on_one_side_differs():
    found = compare([scored([None, -1.0])], [scored([None, None])], 0.5)
    assert (found.largest, found.num_different) == (inf, 1)
    assert str(found.first) == "sequence 0, position 1, token 11: logprob -1 and null"


@pytest.mark.parametrize(
    ("ids", "logprobs", "expected"),
    [
        ([5, 6], [-1.0, -2.0], None),
        ([6, 5], [-1.4, -1.5], "top logprob of token 5 -1 and -1.5"),
        ([5, 7], [-1.0, -1.75], None),  # 6, at -2.0, gave place to a token that is 0.25 more likely
        ([5, 7], [-1.0, -1.25], "top logprob of token 7 null and -1.25"),
        ([5, 7], [-1.0, -2.5], "top logprob of token 6 -2 and null"),
        ([5], [-1.0], "top logprob of token 6 -2 and null"),
    ],
)
def test_top_tokens_are_compared_by_id(ids: list[int], logprobs: list[float], expected: str | None):
    one = scored([-1.0], top_ids=[[5, 6]], top_logprobs=[Floats([-1.0, -2.0])])
    found = compare([one], [scored([-1.0], top_ids=[ids], top_logprobs=[Floats(logprobs)])], 0.25)
    if expected is None:
        assert found.first is None
    else:
        assert str(found.first) == f"sequence 0, position 2, token 12: {expected}"


def test_ranks_count_where_bits_must_be_equal():
    one, other = scored([-1.0], ranks=[1]), scored([-1.0], ranks=[2])
    assert compare([one], [other], 1e-3).first is None
    assert not compare([one], [other], 1e-3).is_equal
    assert str(compare([one], [other], 0.0).first) == "sequence 0, position 2, token 12: rank 1 and 2"


def test_the_tolerance_of_an_entropy_grows_with_it():
    one, other = scored([-1.0], entropies=Floats([4.0])), scored([-1.0], entropies=Floats([4.375]))
    assert compare([one], [other], 0.1).first is None
    assert str(compare([one], [other], 0.09).first).endswith("entropy 4 and 4.375")


@pytest.mark.parametrize("other", [scored([-1.0]), scored([-1.0, -2.0], ranks=[1, 1])])
def test_other_tokens_or_columns_cannot_be_compared(other: ScoredSequence):
    with pytest.raises(ValueError, match="same"):
        compare([scored([-1.0, -2.0])], [other], 1.0)
