"""Stop strings, end tokens and limits end a text at the right token, and the right tokens are kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorepool.engine import Sampling, Sequence
from scorepool.engine.sampling.stop import check_stop, find_stop, min_tokens_banned_ids

TOKEN_BYTES = [b"Hel", b"lo, w", b"orld", b"", b"\xf0\x9f", b"\x98\x80", b"<eos>"]
EOS = 6


def generate(tokens: list[int], **options: object) -> Sequence:
    """Append tokens, each with an entry in some columns, until the sequence ends."""
    sequence = Sequence(token_ids=[99], top_logprobs=1, sampling=Sampling(**({"max_tokens": 10} | options)))
    for token_id in tokens:
        sequence.token_ids.append(token_id)
        sequence.columns.logprobs.append(-float(token_id))
        sequence.columns.top_ids.append([token_id])
        sequence.columns.top_logprobs.append([-1.0])
        sequence.columns.sampled_logprobs.append(-1.0)
        check_stop(sequence, TOKEN_BYTES.__getitem__, frozenset([EOS]))
        if sequence.finish_reason:
            break
    return sequence


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
def test_a_stop_string_cuts_the_text_and_drops_the_tokens_after_it(stop: bytes, text: bytes, kept: list[int]):
    sequence = generate([0, 1, 2], stop=(stop,))

    assert (sequence.text_bytes, sequence.finish_reason) == (text, "stop")
    assert sequence.token_ids[1:] == kept
    assert sequence.columns.logprobs == [-float(token_id) for token_id in kept]
    assert sequence.columns.top_ids == [[token_id] for token_id in kept]
    assert len(sequence.columns.top_logprobs) == len(sequence.columns.sampled_logprobs) == len(kept)
    assert (sequence.columns.ranks, sequence.columns.entropies) == ([], [])


def test_the_stop_string_that_begins_first_cuts_the_text():
    assert generate([0, 1], stop=(b"w", b"o", b"zz")).text_bytes == b"Hell"


def test_a_stop_string_is_found_in_a_character_split_over_tokens():
    assert generate([0, 4, 5], stop=("😀".encode(),)).text_bytes == b"Hel"


def test_a_token_without_bytes_before_the_cut_is_kept():
    assert generate([0, 3, 1, 2], stop=(b"lo",)).token_ids[1:] == [0, 3]


def test_an_eos_token_adds_no_bytes():
    sequence = generate([0, EOS])

    assert (sequence.text_bytes, sequence.finish_reason, sequence.token_ids[1:]) == (b"Hel", "stop", [0, EOS])


def test_a_stop_token_id_ends_the_text_and_is_the_stop_reason():
    sequence = generate([0, 1, 2], stop_token_ids=(1, 2))

    assert (sequence.text_bytes, sequence.finish_reason, sequence.stop_reason) == (b"Hel", "stop", 1)
    assert sequence.token_ids[1:] == [0, 1]
    assert len(sequence.columns.logprobs) == 2


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
def test_stop_reason_is_the_stop_string_or_stop_token_id(
    tokens: list[int], options: dict[str, object], reason: bytes | int | None
):
    sequence = generate(tokens, **options)

    assert sequence.is_done
    assert sequence.stop_reason == reason


def test_ignore_eos_makes_eos_an_ordinary_token():
    sequence = generate([0, EOS, 1, EOS], max_tokens=4, ignore_eos=True)

    assert (sequence.text_bytes, sequence.finish_reason) == (b"Hel<eos>lo, w<eos>", "length")
    assert sequence.token_ids[1:] == [0, EOS, 1, EOS]


@pytest.mark.parametrize(
    ("tokens", "options", "text"),
    [
        ([0, EOS], {}, b"Hel<eos>"),
        ([0, 1], {"stop_token_ids": (1,)}, b"Hello, w"),
        ([0, 1, 2], {"stop": (b"lo",)}, b"Hello"),
        ([0, 1, 2], {"stop": (b"wor",)}, b"Hello, wor"),
    ],
)
def test_include_stop_keeps_what_ended_the_text(tokens: list[int], options: dict[str, object], text: bytes):
    sequence = generate(tokens, include_stop=True, **options)

    assert (sequence.text_bytes, sequence.finish_reason) == (text, "stop")
    assert sequence.token_ids[1:] == tokens[: len(sequence.columns.logprobs)]  # its last token is kept whole


def test_min_tokens_ignores_a_stop_string_that_ends_too_early():
    assert generate([0, 0, 0], stop=(b"el",), min_tokens=2).token_ids[1:] == [0, 0, 0]
    assert generate([0, 0, 0], stop=(b"el",), min_tokens=2).text_bytes == b"HelHelH"
    assert generate([0, 1], stop=(b"lo",), min_tokens=1).text_bytes == b"Hel"  # ends after min_tokens


@given(
    tokens=st.lists(st.integers(0, EOS), min_size=12, max_size=12),
    stop_token_ids=st.sets(st.integers(0, EOS)),
    ignore_eos=st.booleans(),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 12),
)
def test_a_text_ends_at_the_first_end_token_after_min_tokens(
    tokens: list[int], stop_token_ids: set[int], ignore_eos: bool, include_stop: bool, min_tokens: int
):
    options = {"stop_token_ids": tuple(stop_token_ids), "ignore_eos": ignore_eos, "min_tokens": min_tokens}
    sequence = Sequence(token_ids=[99], sampling=Sampling(max_tokens=12, **options))
    sampled = []
    for index, token_id in enumerate(tokens):
        banned = min_tokens_banned_ids(sequence, 1 + index, frozenset([EOS]))
        assert banned == (stop_token_ids | {EOS} if index < min_tokens else set())
        if token_id not in banned:
            sampled.append(token_id)
        else:
            allowed = set(range(EOS + 1)) - banned
            if not allowed:
                return
            sampled.append(min(allowed))
    ends = stop_token_ids if ignore_eos else stop_token_ids | {EOS}
    expected = next((index for index, token_id in enumerate(sampled) if token_id in ends), None)

    sequence = generate(sampled, max_tokens=12, include_stop=include_stop, **options)

    assert expected is None or expected >= min_tokens
    assert sequence.finish_reason == ("length" if expected is None else "stop")
    assert sequence.token_ids[1:] == sampled[: 12 if expected is None else expected + 1]
    kept = sequence.token_ids[1:] if expected is None or include_stop else sequence.token_ids[1:-1]
    assert sequence.text_bytes == b"".join(TOKEN_BYTES[token_id] for token_id in kept)


def test_max_tokens_ends_the_text_with_reason_length():
    sequence = generate([0, 1, 2], max_tokens=2)

    assert (sequence.text_bytes, sequence.finish_reason) == (b"Hello, w", "length")


def test_find_stop_searches_only_where_a_new_match_can_end():
    assert find_stop(b"abab", (b"ab",), 1) == (2, b"ab")
    assert find_stop(b"abab", (b"abc",), 4) is None
