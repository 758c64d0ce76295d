"""Sample the frames of an MP4 or WebM file with PyAV, within bounds that hold whatever the file claims. No MLX.

    time      0      0.5     1.0     1.5       at 2 frames a second, each the one that is on show by then
    file      a   b   c   d   e   f   g
    sampled   a       c       e       g

What the file's header says is checked before anything is decoded: how long it lasts, and how much there is to decode.
"""

import math
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from typing import Any

from PIL.Image import Image

from scorepool.engine.errors import InvalidRequest
from scorepool.engine.images import VideoFile
from scorepool.engine.vision.mp4_tables import check_tables

# None: an extra `vision` that was installed before it had PyAV
av: Any = import_module("av") if find_spec("av") else None
MAX_SECONDS = 3600
MAX_PIXELS = 2**23  # of a frame
MAX_DECODED_PIXELS = 2**32  # of all frames up to the last that is sampled: about 70 s of full HD
DECODERS = ("h264", "hevc", "vp8", "libvpx", "vp9", "libvpx-vp9", "av1", "libdav1d", "mpeg4")
_MICROSECONDS = 1_000_000
_MOMENT_S = 1e-4  # by which times may be rounded


class SampledFrames:
    """The frames of one file. Iterates once."""

    def __init__(self, file: VideoFile, max_frames: int) -> None:
        """Open the file and check what it claims. Raises InvalidRequest."""
        if av is None:
            raise InvalidRequest(
                "the worker is installed without PyAV, which is in the extra `vision`; expected frames"
            )
        self._fps, self._max_frames = file.fps, max_frames
        self._container: Any = None
        try:
            demuxer = "mp4" if file.data[4:8] == b"ftyp" else "webm"
            if demuxer == "mp4":
                check_tables(file.data)
            self._container = av.open(BytesIO(file.data), format=demuxer)
            self.num_frames = self._check(self._container)
        except InvalidRequest:
            self.close()
            raise
        except Exception as error:  # any: what decoders raise on damaged files
            self.close()
            raise _undecodable(error) from error

    def close(self) -> None:
        """Free what the decoder holds."""
        if self._container is not None:
            self._container.close()

    def __iter__(self) -> Iterator[Image]:
        """Yield the frames, upright, in RGB. Raises InvalidRequest."""
        shown: Any = None
        count = 0
        try:
            for frame, seconds in self._decoded():
                while shown is not None and count < self.num_frames and count / self._fps < seconds - _MOMENT_S:
                    yield _to_image(shown)
                    count += 1
                shown = frame
                if count == self.num_frames:
                    return
            if shown is None:
                raise InvalidRequest("a video has no frames")
            for _ in range(self.num_frames - count):
                yield _to_image(shown)
        except InvalidRequest:
            raise
        except Exception as error:  # any: what decoders raise on damaged files
            raise _undecodable(error) from error
        finally:
            self.close()

    def _check(self, container: Any) -> int:
        """Return how many frames are sampled. Raises InvalidRequest for what is too much."""
        if not container.streams.video:
            raise InvalidRequest("a file of a video has no pictures; expected a stream of them")
        stream = container.streams.video[0]
        context = stream.codec_context
        if context.name not in DECODERS:
            raise InvalidRequest(f"a video is coded as {context.name}; expected H.264, H.265, VP8, VP9, AV1 or MPEG-4")
        context.thread_count = 1
        context.options = {"max_pixels": str(2 * MAX_PIXELS)}  # of a frame as it is coded, whatever the header says
        self._stream = stream
        seconds = _seconds(container, stream)
        if not 0 < seconds <= MAX_SECONDS:
            raise InvalidRequest(f"a video lasts {seconds:g} s; expected at most {MAX_SECONDS}")
        num_frames = max(1, math.ceil((seconds - _MOMENT_S) * self._fps))
        if num_frames > self._max_frames:
            raise InvalidRequest(
                f"a video of {seconds:g} s has {num_frames} frames at {self._fps:g} a second; expected at most "
                f"{self._max_frames} (SCOREPOOL_MAX_VIDEO_FRAMES), with a lower `fps`"
            )
        _check_size(context.width, context.height)
        rate = float(stream.average_rate or stream.guessed_rate or 0)
        _check_decoded(int(seconds * rate) * context.width * context.height)
        return num_frames

    def _decoded(self) -> Iterator[tuple[Any, float]]:
        """Yield each frame with its time after the first one."""
        num_pixels, start = 0, None
        for frame in self._container.decode(self._stream):
            _check_size(frame.width, frame.height)
            num_pixels += frame.width * frame.height
            _check_decoded(num_pixels)
            if frame.time is None:
                raise InvalidRequest("a video has a frame without a time")
            start = frame.time if start is None else start
            yield frame, frame.time - start


def _to_image(frame: Any) -> Image:
    image: Image = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


def _seconds(container: Any, stream: Any) -> float:
    if container.duration is not None:
        return float(container.duration) / _MICROSECONDS
    if stream.duration is not None:
        return float(stream.duration * stream.time_base)
    raise InvalidRequest("a video does not say how long it lasts; expected a file that was written to its end")


def _check_size(width: int, height: int) -> None:
    if not 0 < width * height <= MAX_PIXELS:
        raise InvalidRequest(f"a video has frames of {width} x {height} pixels; expected at most {MAX_PIXELS}")


def _check_decoded(num_pixels: int) -> None:
    if num_pixels > MAX_DECODED_PIXELS:
        raise InvalidRequest(
            f"a video has {num_pixels} pixels to decode; expected at most {MAX_DECODED_PIXELS}, of a shorter or "
            "smaller one, or its frames"
        )


def _undecodable(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"a video cannot be decoded: {type(error).__name__}: {str(error)[:200]}")
