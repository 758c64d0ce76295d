"""The object of a stored result: frames of bounded size, which hold the result exactly and show every damage."""

import random

import pytest
from msgspec.structs import replace

from scorepool import wire
from scorepool.wire.stored_result import (
    FRAME_BYTES,
    FrameReader,
    StoredResult,
    count_sequences,
    decode_recorded,
    read_object,
    to_frames,
)
from tests.api.fake_worker import CLASSIFIED, RESULT


def sequence(number: int, num_tokens: int) -> wire.SequenceResult:
    numbers = random.Random(number)
    return wire.SequenceResult(
        token_ids=[numbers.randrange(1000) for _ in range(num_tokens)],
        token_bytes=[b"\xff"] * num_tokens,
        text="é" * number,
        logprobs=wire.Floats([None, *(numbers.uniform(-9, 0) for _ in range(num_tokens - 1))]),
    )


LARGE = replace(RESULT, sequences=[sequence(number, 2000) for number in range(200)])
PATH = "scorepool/ab/abc-e1"


@pytest.mark.parametrize("result", [RESULT, CLASSIFIED, LARGE])
def test_an_object_holds_the_result(result: wire.Result):
    body = b"".join(to_frames(result, PATH))
    assert wire.encode(read_object(body, PATH, len(body))) == wire.encode(result)


def test_frames_are_small():
    sizes = [len(frame) for frame in to_frames(LARGE, PATH)]
    assert len(sizes) > 5
    assert max(sizes) < 1.1 * FRAME_BYTES


def test_a_reader_takes_chunks_of_any_size():
    body = b"".join(to_frames(LARGE, PATH))
    numbers = random.Random(1)
    reader, bodies, start = FrameReader(PATH, len(body)), [], 0
    while start < len(body):
        end = start + numbers.choice([1, 7, 1000, 300_000])
        bodies += reader.feed(body[start:end])
        start = end
    reader.check_end()
    assert sum(map(len, bodies)) + 12 * len(bodies) == len(body)


def test_damage_is_found():
    body = b"".join(to_frames(RESULT, PATH))
    for at in range(len(body)):
        damaged = bytearray(body)
        damaged[at] ^= 1
        with pytest.raises(wire.Invalid, match="damaged"):
            read_object(bytes(damaged), PATH, len(body))
    for end in range(len(body)):
        with pytest.raises(wire.Invalid, match="damaged"):
            read_object(body[:end], PATH, len(body))


def test_the_object_of_another_job_and_frames_in_another_order_are_damage():
    frames = list(to_frames(LARGE, PATH))
    whole = b"".join(frames)
    swapped = b"".join([frames[0], frames[2], frames[1], *frames[3:]])
    for body, path in ((whole, "scorepool/ab/abd-e1"), (whole, "scorepool/ab/abc-e2"), (swapped, PATH)):
        with pytest.raises(wire.Invalid, match="its checksum differs"):
            read_object(body, path, len(body))
    shorter = b"".join(frames[:-1])
    reader = FrameReader(PATH, len(whole))
    list(reader.feed(shorter))
    with pytest.raises(wire.Invalid, match="its end is missing"):
        reader.check_end()


def test_a_length_that_is_damaged_is_found_before_the_rest_is_read():
    body = bytearray(b"".join(to_frames(LARGE, PATH)))
    body[4] ^= 0xFF
    with pytest.raises(wire.Invalid, match="longer than the rest of the object"):
        list(FrameReader(PATH, len(body)).feed(bytes(body[:100])))


def test_redis_records_a_result_a_failure_or_where_the_result_is():
    stored = StoredResult(execution="abc", num_bytes=3, num_sequences=1)
    failure = wire.Failure(code="internal", message="m")
    for outcome in (stored, failure, RESULT):
        assert wire.encode(decode_recorded(wire.encode(outcome))) == wire.encode(outcome)
    assert len(wire.encode(replace(stored, execution="f" * 40, num_bytes=2**40, num_sequences=2**31))) < 256


@pytest.mark.parametrize("wrong", [{"num_sequences": -1}, {"num_sequences": 2**40}, {"num_bytes": -1}])
def test_a_record_with_sizes_that_no_result_has_is_invalid(wrong: dict[str, int]):
    record = replace(StoredResult(execution="abc", num_bytes=3, num_sequences=1), **wrong)
    with pytest.raises(wire.Invalid):
        decode_recorded(wire.encode(record))


def test_frames_count_their_sequences():
    _, *bodies = FrameReader(PATH, sum(map(len, to_frames(LARGE, PATH)))).feed(b"".join(to_frames(LARGE, PATH)))
    assert sum(map(count_sequences, bodies)) == len(LARGE.sequences)
