"""Files of videos: which frames are sampled, and what is refused before anything is decoded."""

import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from scorepool.engine import Engine, EngineSettings, InvalidRequest
from scorepool.engine.images import Video, VideoFile, digest_of

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")
pytest.importorskip("av", reason="the extra `vision` is not installed")
from scorepool.engine.vision import codec as vision_codec
from scorepool.engine.vision import video_file
from scorepool.engine.vision.video_file import SampledFrames
from tests.tiny_vision import build_mistral3, build_qwen2_5_vl
from tests.videos import audio_bytes, video_bytes

LEVELS = list(range(0, 240, 4))  # two seconds


def levels(data: bytes, fps: float, max_frames: int = 128) -> list[int]:
    """Return the brightness of the sampled frames."""
    sampled = SampledFrames(VideoFile(data, fps), max_frames)
    found = [round(float(np.asarray(frame, np.float32).mean())) for frame in sampled]
    assert len(found) == sampled.num_frames
    return found


@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "libx264"), ("mp4", "mpeg4"), ("webm", "libvpx"), ("webm", "libvpx-vp9")]
)
def test_a_frame_is_the_one_on_show_at_its_time(kind: str, codec: str):
    data = video_bytes(LEVELS, kind=kind, codec=codec)
    assert levels(data, 2.0) == pytest.approx([LEVELS[index] for index in (0, 15, 30, 45)], abs=3)
    assert len(levels(data, 30.0)) == len(LEVELS)
    assert levels(data, 0.1) == pytest.approx([0], abs=3)


def test_a_video_of_a_phone_that_was_held_upright_is_shown_upright():
    data = bytearray(video_bytes([40], width=64, height=48))
    at = data.index(b"tkhd") + 44  # its matrix
    data[at : at + 36] = struct.pack(">9I", 0, 0x10000, 0, 0xFFFF0000, 0, 0, 0, 0, 0x40000000)  # a quarter clockwise
    [frame] = SampledFrames(VideoFile(bytes(data), 2.0), 4)
    assert frame.size == (48, 64)


def test_frames_that_last_are_sampled_again():
    data = video_bytes([40, 120, 200], times=[0, 1.0, 1.1])
    assert levels(data, 4.0)[:5] == pytest.approx([40, 40, 40, 40, 120], abs=3)
    assert levels(video_bytes([80]), 2.0) == pytest.approx([80], abs=3)


def test_a_file_is_shown_as_its_frames_are(tmp_path: Path):
    build_qwen2_5_vl(tmp_path)
    data, frames = video_bytes(LEVELS), []
    for frame in SampledFrames(VideoFile(data, 2.0), 128):
        file = io.BytesIO()
        frame.save(file, "PNG")
        frames.append(file.getvalue())
    engine = Engine(EngineSettings(model=str(tmp_path), max_video_frames=4))
    try:
        codec = engine.chat.images
        of_file, of_frames = (codec.tokens_of(each) for each in (VideoFile(data, 2.0), Video(tuple(frames), 2.0)))
        pixels = [codec.process(each.digest, each.data).arrays["pixels"] for each in (of_file, of_frames)]
        with pytest.raises(InvalidRequest, match=r"has 8 frames at 4 a second; .* 4 \(SCOREPOOL_MAX_VIDEO_FRAMES\)"):
            codec.tokens_of(VideoFile(data, 4.0))
        with pytest.raises(InvalidRequest, match="a video cannot be resized as the model's processor does"):
            codec.tokens_of(VideoFile(video_bytes([1], width=4096, height=16), 2.0))
    finally:
        engine.close()
    assert np.array_equal(*pixels)
    assert (of_file.token_ids, of_file.times, of_file.num_frames) == (of_frames.token_ids, of_frames.times, 4)
    assert len({of_file.digest, of_frames.digest, digest_of(VideoFile(data, 3.0)), digest_of(data)}) == 4


def test_a_model_of_images_gets_the_sampled_frames_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    build_mistral3(tmp_path)
    engine = Engine(EngineSettings(model=str(tmp_path), max_video_frames=4))
    file = VideoFile(video_bytes(LEVELS), 2.0)
    try:
        codec = engine.chat.images
        frames = codec.frames_of(file)
        with monkeypatch.context() as patch:
            patch.setattr(vision_codec, "SampledFrames", None)  # the last video is not decoded again
            assert codec.frames_of(file) == frames
            assert codec.frames_of(Video((b"a", b"b"), 2.0)) == (b"a", b"b")
        with pytest.raises(InvalidRequest, match=r"has 8 frames at 4 a second; .* 4 \(SCOREPOOL_MAX_VIDEO_FRAMES\)"):
            codec.frames_of(VideoFile(file.data, 4.0))
        monkeypatch.setattr(vision_codec, "MAX_FRAME_BYTES", 100)
        with pytest.raises(InvalidRequest, match="have more than 100 bytes as images"):
            codec.frames_of(VideoFile(file.data, 1.9))
    finally:
        engine.close()
    expected = [np.asarray(frame) for frame in SampledFrames(file, 4)]
    assert np.array_equal([np.asarray(vision_codec.decode(frame)) for frame in frames], expected)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (video_bytes([0, 9], times=[0, 36_000]), "lasts 36000.* s; expected at most 3600"),
        (video_bytes([0, 9], times=[0, 3000]), r"frames at 2 a second; expected at most 128 \(SCOREPOOL_MAX_VIDEO_"),
        (video_bytes([0], width=4096, height=2304, codec="mpeg4"), "frames of 4096 x 2304 pixels; expected at most"),
        (audio_bytes(), "has no pictures"),
        (b"\x00\x00\x00\x18ftypmp42" + bytes(100), "cannot be decoded"),
        (b"\x1aE\xdf\xa3" + os.urandom(1000), "cannot be decoded"),
        (video_bytes(LEVELS)[:400], "cannot be decoded"),
        (video_bytes([0, 9], codec="mjpeg", kind="mov").replace(b"ftypqt  ", b"ftypmp42"), "is coded as mjpeg"),
    ],
)  # fmt: skip
def test_what_costs_too_much_or_is_no_video_is_refused(data: bytes, says: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SampledFrames, "_decoded", None)  # nothing is decoded
    with pytest.raises(InvalidRequest, match=says):
        SampledFrames(VideoFile(data, 2.0), 128)


def with_count(data: bytes, table: bytes, at: int, count: int) -> bytes:
    """Return an MP4 file, one table of which claims to have so many entries."""
    at += data.index(table) + 4
    return data[:at] + count.to_bytes(4, "big") + data[at + 4 :]


IN_FRAGMENTS = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (with_count(video_bytes([0, 9]), b"stsz", 8, 10**8), "claims 100000000 samples and 1 edits of them"),
        (with_count(video_bytes([0, 9], **IN_FRAGMENTS), b"trun", 4, 10**8), r"claims 10000000\d samples"),
        (with_count(video_bytes(LEVELS), b"elst", 4, 10**6), "claims 60 samples and 1000000 edits"),
        (video_bytes([0, 9]).replace(b"udta", b"cmov"), "has a compressed header"),
    ],
)
def test_tables_that_claim_more_than_the_file_can_hold_are_refused(
    data: bytes, says: str, monkeypatch: pytest.MonkeyPatch
):
    """A demuxer makes an entry of each, whose memory would be hundreds of thousand times the file's."""
    monkeypatch.setattr(video_file, "av", object())  # nothing is opened
    with pytest.raises(InvalidRequest, match=says):
        SampledFrames(VideoFile(data, 2.0), 128)


def test_a_stream_of_larger_frames_than_its_header_says_is_refused(monkeypatch: pytest.MonkeyPatch):
    data = video_bytes([0, 9, 20], width=64, height=48)
    monkeypatch.setattr(video_file, "MAX_PIXELS", 64 * 48 // 3)
    monkeypatch.setattr(video_file, "_check_size", lambda width, height: None)  # as if the header said less
    with pytest.raises(InvalidRequest, match="cannot be decoded"):
        list(SampledFrames(VideoFile(data, 2.0), 128))


def test_a_file_that_claims_less_than_it_has_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(video_file, "MAX_DECODED_PIXELS", 64 * 48 * 20)
    with pytest.raises(InvalidRequest, match=r"has \d+ pixels to decode; expected at most 61440"):
        SampledFrames(VideoFile(video_bytes(LEVELS), 2.0), 128)
    monkeypatch.setattr(video_file, "_seconds", lambda container, stream: 0.5)
    assert len(levels(video_bytes(LEVELS), 2.0)) == 1
    sampled = SampledFrames(VideoFile(video_bytes(LEVELS), 2.0), 128)
    sampled.num_frames = 4  # what a header may say
    with pytest.raises(InvalidRequest, match="pixels to decode"):
        list(sampled)
