"""Sent tokens are never taken back, even if deltas come late, twice or not at all."""

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


def tokens(first: int, *ids: int) -> wire.TokenDelta:
    return wire.TokenDelta(id="j", sequence=0, first=first, token_ids=list(ids), token_bytes=[WORDS[i] for i in ids])


def sequence(*ids: int, text: str) -> wire.SequenceResult:
    return wire.SequenceResult(
        token_ids=list(ids), token_bytes=[WORDS[i] for i in ids], text=text, finish_reason="stop"
    )


def test_deltas_join_to_the_result():
    stream = ChoiceStream(0)

    deltas = [
        stream.add(tokens(0, 1)),
        stream.add(tokens(1, 2, 3)),
        stream.end(sequence(1, 2, 3, 4, 5, text="Hello 🙂")),
    ]

    assert [delta.text for delta in deltas] == ["Hel", "lo ", "🙂"]
    assert [delta.sequence.token_ids for delta in deltas] == [[1], [2, 3], [4, 5]]
    assert [delta.text_offset for delta in deltas] == [[0], [3, 6], [6, 7]]
    assert deltas[-1].contents == [b"\x99\x82", b""]
    assert [delta.finish_reason for delta in deltas] == [None, None, "stop"]


def test_skipped_tokens_add_no_text_and_have_an_offset():
    def skipping(tokens: wire.TokenDelta | wire.SequenceResult, *numbers: int) -> wire.TokenDelta | wire.SequenceResult:
        return replace(tokens, skipped=list(numbers))

    stream = ChoiceStream(0)

    deltas = [
        stream.add(skipping(tokens(0, 1, 5), 1)),
        stream.add(skipping(tokens(1, 5, 2, 5), 1, 3)),
        stream.end(skipping(sequence(1, 5, 2, 5, 3, 5, 4, 5, text="Hello 🙂"), 1, 3, 5, 7)),
    ]

    assert [delta.text for delta in deltas] == ["Hel", "lo ", "🙂"]
    assert [delta.sequence.token_ids for delta in deltas] == [[1, 5], [2, 5], [3, 5, 4, 5]]
    assert [delta.text_offset for delta in deltas] == [[0, 3], [3, 6], [6, 6, 6, 7]]
    assert content_bytes(skipping(sequence(5, 1, 2, text="Hell"), 0)) == [b"", b"Hel", b"l"]


def test_the_stop_reason_is_in_the_last_delta():
    stream = ChoiceStream(0)

    first, last = stream.add(tokens(0, 1)), stream.end(replace(sequence(1, 2, text="Hel"), stop_reason=2))

    assert (first.stop_reason, last.stop_reason) == (None, 2)


def test_missing_tokens_come_with_the_result_and_repeated_ones_are_sent_once():
    stream = ChoiceStream(0)

    assert stream.add(tokens(1, 2)) is None
    assert stream.add(tokens(0, 1)).text == "Hel"
    assert stream.add(tokens(0, 1)) is None
    assert stream.add(tokens(0, 1, 2)).text == "lo "
    assert stream.end(sequence(1, 2, text="Hello ")).text == ""


def test_a_second_run_with_other_tokens_diverges():
    stream = ChoiceStream(0)
    stream.add(tokens(0, 1, 2))

    with pytest.raises(Diverged):
        stream.add(tokens(0, 2, 1))
    with pytest.raises(Diverged):
        stream.end(sequence(1, 1, text="HelHel"))


def test_an_unfinished_character_is_in_the_text():
    stream = ChoiceStream(0)

    first = stream.add(tokens(0, 1, 3))

    assert first.text + stream.end(sequence(1, 3, text="Hel\ufffd")).text == "Hel\ufffd"


def test_token_text():
    assert token_text(1, b" caf\xc3\xa9") == " café"
    assert token_text(7, b"\xe2\x80") == "bytes:\\xe2\\x80"
    assert token_text(7, b"\xe2\x80", as_ids=True) == "token_id:7"


def test_tokens_with_equal_text_keep_the_larger_logprob():
    assert logprobs_by_text([(1, b"a", -2.0), (2, b"a", -1.0), (3, b"b", -3.0)]) == {"a": -1.0, "b": -3.0}
    assert logprobs_by_text([(2, b"a", -1.0), (1, b"a", -2.0)]) == {"a": -1.0}


def test_offsets_count_characters():
    assert text_offsets([b"a", b"\xf0\x9f", b"\x99\x82", b"b"]) == [0, 1, 1, 2]


def test_an_echoed_text_equals_the_prompt():
    def prompt(*tokens: bytes, bos: bool) -> wire.SequenceResult:
        return wire.SequenceResult(
            token_ids=[0] * len(tokens),
            token_bytes=list(tokens),
            text="",
            bos_added=bos,
            num_reported_prompt_tokens=len(tokens),
        )

    assert echoed_bytes(prompt(b"<s>", b" Hi", b" you", bos=True), "Hi you") == [b"", b"Hi", b" you"]
    assert echoed_bytes(prompt(b" Hi", bos=False), " Hi") == [b" Hi"]
    assert echoed_bytes(prompt(b"<s>", b" Hi", bos=False), None) == [b"<s>", b" Hi"]
    generated = replace(prompt(b"<s>", b" Hi", bos=True), num_reported_prompt_tokens=1)
    assert echoed_bytes(generated, "") == [b"", b" Hi"]


def test_contents_end_with_the_text():
    assert content_bytes(sequence(1, 2, 5, text="Hell")) == [b"Hel", b"l", b""]
    assert content_bytes(sequence(1, 3, text="Hel\ufffd")) == [b"Hel", b"\xf0\x9f"]
    assert content_bytes(sequence(1, 3, 5, text="Hel\ufffd")) == [b"Hel", b"\xf0\x9f", b""]
    assert content_bytes(sequence(3, 2, text="\ufffdl")) == [b"\xf0\x9f", b"l"]
    assert content_bytes(sequence(text="")) == []
