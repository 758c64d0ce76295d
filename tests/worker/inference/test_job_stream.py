"""Tokens of a job that streams are emitted once, in order, and never if a stop string may remove them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorepool import wire
from scorepool.engine import Sampling, Sequence, Targets
from scorepool.engine.sampling.stop import check_stop
from scorepool.worker.inference.job_stream import JobStream, PartialStop
from scorepool.worker.inference.prepared import PreparedSequence
from tests.worker.fake import FakeChatCodec, FakeEngine, FakeTokenizer

TOKENIZER = FakeTokenizer()
CODEC = FakeChatCodec(TOKENIZER)


def sequence_of(*stops: bytes, prompt: bytes = b"p") -> Sequence:
    sampling = Sampling(max_tokens=50, stop=stops)
    return Sequence(token_ids=list(prompt), score_from=0, top_logprobs=1, sampling=sampling)


def step(stream: JobStream, sequence: Sequence, token: bytes) -> list[wire.TokenDelta]:
    """Append a token as the engine does, and return what is emitted."""
    sequence.token_ids += token
    sequence.columns.logprobs += [-float(len(sequence.token_ids))] * len(token)
    sequence.columns.top_ids += [[1]] * len(token)
    sequence.columns.top_logprobs += [[-0.5]] * len(token)
    check_stop(sequence, TOKENIZER.token_bytes, TOKENIZER.eos_ids)
    stream.on_step([sequence])
    return stream.take(10**6)[0]


def stream_of(sequence: Sequence, with_logprobs: bool = True, skipped_ids: frozenset[int] = frozenset()) -> JobStream:
    sequence.append_unpredicted()
    prepared = PreparedSequence(sequence, sequence.num_input_tokens, False, False, skipped_ids=skipped_ids)
    return JobStream("j", [prepared], with_logprobs, CODEC)


def test_each_step_emits_its_token_with_its_logprobs():
    sequence = sequence_of()
    stream = stream_of(sequence)

    (first,), (second,) = step(stream, sequence, b"a"), step(stream, sequence, b"b")

    assert (first.id, first.sequence, first.first, first.token_ids) == ("j", 0, 0, [97])
    assert (first.num_prompt_tokens, second.num_prompt_tokens) == (sequence.num_input_tokens, None)
    assert (second.first, second.token_bytes) == (1, [b"b"])
    assert first.logprobs.values() == [-2.0]  # the prompt's entry is not emitted
    assert (second.top_ids, second.top_bytes, second.top_logprobs[0].values()) == ([[1]], [[b"\x01"]], [-0.5])


def test_the_first_delta_names_the_weights_also_if_it_is_taken_when_they_are_gone():
    sequence = sequence_of()
    sequence.model_info = replace(FakeEngine.model_info, adapter="x@1")
    stream = stream_of(sequence)

    (first,), (second,) = step(stream, sequence, b"a"), step(stream, sequence, b"b")
    sequence.model_info = None  # it begins anew with others
    stream.rewind(0, 0)
    (again,), _ = stream.take(10**6)

    assert [first.weights, second.weights, again.weights] == [
        f"{FakeEngine.model_info.fingerprint},x@1",
        None,
        first.weights,
    ]


def test_targets_are_emitted_and_named_with_the_first_token():
    sequence = sequence_of()
    sequence.targets = Targets([[100, 101]], is_shared=True)
    sequence.append_unpredicted()
    stream = JobStream("j", [PreparedSequence(sequence, 1, False, False, names_targets=True)], True, CODEC)

    deltas = []
    for token in (b"a", b"b"):
        sequence.columns.target_logprobs.append([-1.5, -2.5])
        deltas += step(stream, sequence, token)
    stream.rewind(0, 0)
    (again,), _ = stream.take(10**6)

    assert [delta.target_bytes for delta in [*deltas, again]] == [[b"d", b"e"], None, [b"d", b"e"]]
    assert [each.values() for delta in deltas for each in delta.target_logprobs] == [[-1.5, -2.5]] * 2


def test_without_logprobs_none_are_emitted():
    sequence = sequence_of()

    (delta,) = step(stream_of(sequence, with_logprobs=False), sequence, b"a")

    assert delta.logprobs is None
    assert delta.top_ids is None


def test_the_beginning_of_a_stop_string_is_held_back_until_it_is_none():
    sequence = sequence_of(b"xyz", b"yq")
    stream = stream_of(sequence)

    assert [delta.token_bytes for delta in step(stream, sequence, b"a")] == [[b"a"]]
    assert step(stream, sequence, b"x") == []
    assert step(stream, sequence, b"y") == []
    (released,) = step(stream, sequence, b"b")
    assert (released.first, released.token_bytes) == (1, [b"x", b"y", b"b"])
    assert step(stream, sequence, b"y") == []
    assert step(stream, sequence, b"q") == []  # the stop string: no part of it was emitted
    assert sequence.finish_reason == "stop"


def test_skipped_tokens_are_emitted_with_their_indices():
    sequence = sequence_of(b"bc")
    stream = stream_of(sequence, skipped_ids=frozenset(b"<"))

    deltas = [delta for token in (b"<", b"a", b"b", b"<", b"a") for delta in step(stream, sequence, token)]

    assert [(delta.first, delta.token_bytes, delta.skipped) for delta in deltas] == [
        (0, [b"<"], [0]),
        (1, [b"a"], []),
        (2, [b"b", b"<"], [3]),  # "b" was held back
        (4, [b"a"], []),
    ]


def test_tokens_are_taken_in_pieces_and_again_after_a_rewind():
    sequence = sequence_of()
    stream = stream_of(sequence)
    taken = [delta for token in b"abcdef" for delta in step(stream, sequence, bytes([token]))]
    stream.rewind(0, 2)
    stream.rewind(0, 3)  # changes nothing
    stream.rewind(1, 0)  # no such sequence

    assert stream.has_pending
    pieces = [delta for _ in range(9) for delta in stream.take(100)[0]]

    assert [token for piece in pieces for token in piece.token_ids] == [*b"cdef"]
    assert len(pieces) > 1
    assert [value for piece in pieces for value in piece.logprobs.values()] == [
        value for delta in taken[2:] for value in delta.logprobs.values()
    ]
    assert stream.take(100) == ([], 0)
    assert not stream.has_pending


@pytest.mark.parametrize(
    ("text", "stops", "length"),
    [
        (b"ab", (b"bc",), 1),
        (b"ab", (b"abc", b"bx"), 2),
        (b"ab", (b"b",), 0),
        (b"", (b"a",), 0),
        (b"aab", (b"aabx",), 3),
        (b"xabab", (b"abab", b"q"), 2),  # ignored, as with min_tokens: what is left may begin another one
    ],
)
def test_the_length_of_a_partial_stop_string(text: bytes, stops: tuple[bytes, ...], length: int):
    partial_stop = PartialStop(stops)
    partial_stop.read(text)

    assert partial_stop.length == length


@given(
    pieces=st.lists(st.text("ab").map(str.encode)),
    stops=st.lists(st.text("ab", min_size=1, max_size=6).map(str.encode), max_size=3),
)
def test_a_partial_stop_string_is_found_however_the_text_grows(pieces: list[bytes], stops: list[bytes]):
    partial_stop, text = PartialStop(stops), bytearray()
    for piece in pieces:
        text += piece
        partial_stop.read(text)

        beginnings = [stop[:size] for stop in stops for size in range(len(stop))]
        assert partial_stop.length == max((len(each) for each in beginnings if text.endswith(each)), default=0)


def test_stop_strings_cost_a_step_no_more_than_the_bytes_that_it_adds():
    class CountedStop(bytes):
        num_reads = 0

        def __getitem__(self, index: object) -> int:
            type(self).num_reads += 1
            return super().__getitem__(index)  # type: ignore[index,return-value]

    stop = CountedStop(b"a" * 1023 + b"x")
    partial_stop, text = PartialStop([stop]), bytearray(b"a" * 1022)
    partial_stop.read(text)
    CountedStop.num_reads = 0
    for _ in range(100):
        text += b"ba"
        partial_stop.read(text)

    assert partial_stop.length == 1
    assert CountedStop.num_reads <= 1023 + 8 * 100  # once through all beginnings, then a few for each byte
