"""What was sent is never taken back, whatever comes late, twice or not at all."""

import pytest
from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.deltas import ChoiceStream, Diverged
from scorepool.api.dialects.detokenizer import (
    content_bytes,
    echoed_bytes,
    logprobs_by_text,
    text_offsets,
    token_text,
)

WORDS = {1: b"Hel", 2: b"lo ", 3: b"\xf0\x9f", 4: b"\x99\x82", 5: b"<end>"}


def growth(first: int, *ids: int) -> wire.TokenDelta:
    return wire.TokenDelta(id="j", sequence=0, first=first, token_ids=list(ids), token_bytes=[WORDS[i] for i in ids])


def scored(*ids: int, text: str) -> wire.SequenceResult:
    return wire.SequenceResult(
        token_ids=list(ids), token_bytes=[WORDS[i] for i in ids], text=text, finish_reason="stop"
    )


def test_pieces_join_to_the_result():
    growing = ChoiceStream(0)

    pieces = [
        growing.add(growth(0, 1)),
        growing.add(growth(1, 2, 3)),
        growing.end(scored(1, 2, 3, 4, 5, text="Hello 🙂")),
    ]

    assert [piece.text for piece in pieces] == ["Hel", "lo ", "🙂"]
    assert [piece.sequence.token_ids for piece in pieces] == [[1], [2, 3], [4, 5]]
    assert [piece.text_offset for piece in pieces] == [[0], [3, 6], [6, 7]]
    assert pieces[-1].contents == [b"\x99\x82", b""]
    assert [piece.finish_reason for piece in pieces] == [None, None, "stop"]


def test_what_is_skipped_is_in_no_text_and_has_its_place():
    def skipping(told: wire.TokenDelta | wire.SequenceResult, *numbers: int) -> wire.TokenDelta | wire.SequenceResult:
        return replace(told, skipped=list(numbers))

    growing = ChoiceStream(0)

    pieces = [
        growing.add(skipping(growth(0, 1, 5), 1)),
        growing.add(skipping(growth(1, 5, 2, 5), 1, 3)),
        growing.end(skipping(scored(1, 5, 2, 5, 3, 5, 4, 5, text="Hello 🙂"), 1, 3, 5, 7)),
    ]

    assert [piece.text for piece in pieces] == ["Hel", "lo ", "🙂"]
    assert [piece.sequence.token_ids for piece in pieces] == [[1, 5], [2, 5], [3, 5, 4, 5]]
    assert [piece.text_offset for piece in pieces] == [[0, 3], [3, 6], [6, 6, 6, 7]]
    assert content_bytes(skipping(scored(5, 1, 2, text="Hell"), 0)) == [b"", b"Hel", b"l"]


def test_what_ended_a_choice_is_told_at_its_end():
    growing = ChoiceStream(0)

    first, last = growing.add(growth(0, 1)), growing.end(replace(scored(1, 2, text="Hel"), stop_reason=2))

    assert (first.stop_reason, last.stop_reason) == (None, 2)


def test_what_is_missing_comes_with_the_result_and_what_comes_twice_is_sent_once():
    growing = ChoiceStream(0)

    assert growing.add(growth(1, 2)) is None
    assert growing.add(growth(0, 1)).text == "Hel"
    assert growing.add(growth(0, 1)) is None
    assert growing.add(growth(0, 1, 2)).text == "lo "
    assert growing.end(scored(1, 2, text="Hello ")).text == ""


def test_a_second_run_that_takes_another_way_is_told():
    growing = ChoiceStream(0)
    growing.add(growth(0, 1, 2))

    with pytest.raises(Diverged):
        growing.add(growth(0, 2, 1))
    with pytest.raises(Diverged):
        growing.end(scored(1, 1, text="HelHel"))


def test_a_character_that_stays_unfinished_is_in_the_text():
    growing = ChoiceStream(0)

    first = growing.add(growth(0, 1, 3))

    assert first.text + growing.end(scored(1, 3, text="Hel\ufffd")).text == "Hel\ufffd"


def test_spellings():
    assert token_text(1, b" caf\xc3\xa9") == " café"
    assert token_text(7, b"\xe2\x80") == "bytes:\\xe2\\x80"
    assert token_text(7, b"\xe2\x80", as_ids=True) == "token_id:7"


def test_of_strings_that_collide_the_likelier_keeps_its_value():
    assert logprobs_by_text([(1, b"a"), (2, b"a"), (3, b"b")], [-2.0, -1.0, -3.0]) == {"a": -1.0, "b": -3.0}
    assert logprobs_by_text([(2, b"a"), (1, b"a")], [-1.0, -2.0]) == {"a": -1.0}


def test_offsets_are_of_characters():
    assert text_offsets([b"a", b"\xf0\x9f", b"\x99\x82", b"b"]) == [0, 1, 1, 2]


def test_an_echoed_text_is_the_one_that_was_given():
    def of(*pieces: bytes, bos: bool) -> wire.SequenceResult:
        return wire.SequenceResult(
            token_ids=[0] * len(pieces),
            token_bytes=list(pieces),
            text="",
            bos_added=bos,
            num_reported_prompt_tokens=len(pieces),
        )

    assert echoed_bytes(of(b"<s>", b" Hi", b" you", bos=True), "Hi you") == [b"", b"Hi", b" you"]
    assert echoed_bytes(of(b" Hi", bos=False), " Hi") == [b" Hi"]
    assert echoed_bytes(of(b"<s>", b" Hi", bos=False), None) == [b"<s>", b" Hi"]


def test_content_ends_where_the_text_does():
    assert content_bytes(scored(1, 2, 5, text="Hell")) == [b"Hel", b"l", b""]
    assert content_bytes(scored(1, 3, text="Hel\ufffd")) == [b"Hel", b"\xf0\x9f"]
    assert content_bytes(scored(1, 3, 5, text="Hel\ufffd")) == [b"Hel", b"\xf0\x9f", b""]
    assert content_bytes(scored(3, 2, text="\ufffdl")) == [b"\xf0\x9f", b"l"]
    assert content_bytes(scored(text="")) == []
