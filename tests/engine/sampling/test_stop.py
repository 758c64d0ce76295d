"""When a text ends and which tokens stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorepool.engine import Sampling, Sequence
from scorepool.engine.sampling.stop import check_stop, first_stop, min_tokens_banned_ids

PIECES = [b"Hel", b"lo, w", b"orld", b"", b"\xf0\x9f", b"\x98\x80", b"<eos>"]
EOS = 6


def generate(tokens: list[int], **options: object) -> Sequence:
    """Feed tokens until the end, each with an entry in some columns."""
    row = Sequence(token_ids=[99], top_logprobs=1, sampling=Sampling(**({"max_tokens": 10} | options)))
    for token_id in tokens:
        row.token_ids.append(token_id)
        row.logprobs.append(-float(token_id))
        row.top_ids.append([token_id])
        row.top_values.append([-1.0])
        row.sampled_logprobs.append(-1.0)
        check_stop(row, PIECES.__getitem__, frozenset([EOS]))
        if row.finish_reason:
            break
    return row


@pytest.mark.parametrize(
    ("stop", "text", "kept"),
    [
        (b"lo", b"Hel", [0]),  # "lo, w" begins at the cut
        (b"o, worl", b"Hell", [0, 1]),  # a token straddles the cut
        (b"el", b"H", [0]),
        (b"Hel", b"", []),
        (b"ld", b"Hello, wor", [0, 1, 2]),
    ],
)
def test_the_text_is_cut_before_the_stop_string_and_tokens_behind_the_cut_are_dropped(
    stop: bytes, text: bytes, kept: list[int]
):
    row = generate([0, 1, 2], stop=(stop,))

    assert (row.text_bytes, row.finish_reason) == (text, "stop")
    assert row.token_ids[1:] == kept
    assert row.logprobs == [-float(token_id) for token_id in kept]
    assert row.top_ids == [[token_id] for token_id in kept]
    assert len(row.top_values) == len(row.sampled_logprobs) == len(kept)
    assert (row.ranks, row.entropies) == ([], [])


def test_the_first_of_several_stop_strings_counts():
    assert generate([0, 1], stop=(b"w", b"o", b"zz")).text_bytes == b"Hell"


def test_a_stop_string_inside_a_character_split_over_tokens_is_found():
    assert generate([0, 4, 5], stop=("😀".encode(),)).text_bytes == b"Hel"


def test_a_token_without_bytes_before_the_cut_is_kept():
    assert generate([0, 3, 1, 2], stop=(b"lo",)).token_ids[1:] == [0, 3]


def test_end_of_sequence_adds_no_bytes():
    row = generate([0, EOS])

    assert (row.text_bytes, row.finish_reason, row.token_ids[1:]) == (b"Hel", "stop", [0, EOS])


def test_a_token_of_the_callers_ends_the_text_as_end_of_sequence_does_and_is_named():
    row = generate([0, 1, 2], stop_token_ids=(1, 2))

    assert (row.text_bytes, row.finish_reason, row.stop_reason) == (b"Hel", "stop", 1)
    assert row.token_ids[1:] == [0, 1]
    assert len(row.logprobs) == 2


@pytest.mark.parametrize(
    ("tokens", "options", "reason"),
    [
        ([0, EOS], {}, None),
        ([0, EOS], {"stop_token_ids": (EOS,)}, None),
        ([0, EOS], {"stop_token_ids": (EOS,), "ignore_eos": True}, EOS),
        ([0, 1], {"stop": (b"w", b"lo", b"zz")}, b"lo"),
        ([0, 1], {"stop": (b"lo, ", b"lo")}, b"lo, "),
        ([0, 1], {"max_tokens": 2, "stop": (b"z",), "stop_token_ids": (3,)}, None),
    ],
)
def test_what_ended_the_text_is_told_where_the_caller_named_it(
    tokens: list[int], options: dict[str, object], reason: bytes | int | None
):
    row = generate(tokens, **options)

    assert row.is_done
    assert row.stop_reason == reason


def test_end_of_sequence_that_is_ignored_is_a_token_like_others():
    row = generate([0, EOS, 1, EOS], max_tokens=4, ignore_eos=True)

    assert (row.text_bytes, row.finish_reason) == (b"Hel<eos>lo, w<eos>", "length")
    assert row.token_ids[1:] == [0, EOS, 1, EOS]


@pytest.mark.parametrize(
    ("tokens", "options", "text"),
    [
        ([0, EOS], {}, b"Hel<eos>"),
        ([0, 1], {"stop_token_ids": (1,)}, b"Hello, w"),
        ([0, 1, 2], {"stop": (b"lo",)}, b"Hello"),
        ([0, 1, 2], {"stop": (b"wor",)}, b"Hello, wor"),
    ],
)
def test_what_ended_the_text_is_in_it_where_it_is_to_be(tokens: list[int], options: dict[str, object], text: bytes):
    row = generate(tokens, include_stop=True, **options)

    assert (row.text_bytes, row.finish_reason) == (text, "stop")
    assert row.token_ids[1:] == tokens[: len(row.logprobs)]  # the token in which it ends is whole


def test_a_stop_string_that_ends_too_early_is_not_seen_and_the_next_is():
    assert generate([0, 0, 0], stop=(b"el",), min_tokens=2).token_ids[1:] == [0, 0, 0]
    assert generate([0, 0, 0], stop=(b"el",), min_tokens=2).text_bytes == b"HelHelH"
    assert generate([0, 1], stop=(b"lo",), min_tokens=1).text_bytes == b"Hel"  # it ends late enough


@given(
    tokens=st.lists(st.integers(0, EOS), min_size=12, max_size=12),
    stop_token_ids=st.sets(st.integers(0, EOS)),
    ignore_eos=st.booleans(),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 12),
)
def test_a_text_ends_at_the_first_token_that_may_end_it(
    tokens: list[int], stop_token_ids: set[int], ignore_eos: bool, include_stop: bool, min_tokens: int
):
    """Of tokens that the bars let pass."""
    options = {"stop_token_ids": tuple(stop_token_ids), "ignore_eos": ignore_eos, "min_tokens": min_tokens}
    row = Sequence(token_ids=[99], sampling=Sampling(max_tokens=12, **options))
    sampled = []
    for place, token_id in enumerate(tokens):
        barred = min_tokens_banned_ids(row, 1 + place, frozenset([EOS]))
        assert barred == (stop_token_ids | {EOS} if place < min_tokens else set())
        if token_id not in barred:
            sampled.append(token_id)
        else:
            allowed = set(range(EOS + 1)) - barred
            if not allowed:
                return
            sampled.append(min(allowed))
    ends = stop_token_ids if ignore_eos else stop_token_ids | {EOS}
    expected = next((place for place, token_id in enumerate(sampled) if token_id in ends), None)

    row = generate(sampled, max_tokens=12, include_stop=include_stop, **options)

    assert expected is None or expected >= min_tokens
    assert row.finish_reason == ("length" if expected is None else "stop")
    assert row.token_ids[1:] == sampled[: 12 if expected is None else expected + 1]
    shown = row.token_ids[1:] if expected is None or include_stop else row.token_ids[1:-1]
    assert row.text_bytes == b"".join(PIECES[token_id] for token_id in shown)


def test_max_tokens_ends_with_length():
    row = generate([0, 1, 2], max_tokens=2)

    assert (row.text_bytes, row.finish_reason) == (b"Hello, w", "length")


def test_a_stop_string_is_looked_for_only_where_a_new_one_can_end():
    assert first_stop(b"abab", (b"ab",), 1) == (2, b"ab")
    assert first_stop(b"abab", (b"abc",), 4) is None
