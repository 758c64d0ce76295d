"""When a text ends and which tokens stay."""

import pytest

from engine import Sampling, Sequence
from engine.stop import end_if_done, first_stop

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
        end_if_done(row, PIECES.__getitem__, frozenset([EOS]))
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


def test_max_tokens_ends_with_length():
    row = generate([0, 1, 2], max_tokens=2)

    assert (row.text_bytes, row.finish_reason) == (b"Hello, w", "length")


def test_a_stop_string_is_looked_for_only_where_a_new_one_can_end():
    assert first_stop(b"abab", (b"ab",), 1) == 2
    assert first_stop(b"abab", (b"abc",), 4) is None
