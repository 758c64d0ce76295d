"""Files of videos in memory, whose frames are told apart by their brightness."""

import io
from fractions import Fraction
from typing import Any

import av
import numpy as np


def video_bytes(
    levels: list[int], rate: int = 30, *, kind: str = "mp4", codec: str = "libx264", width: int = 64, height: int = 48,
    times: list[float] | None = None, **options: str,
) -> bytes:  # fmt: skip
    """Return a video with a frame of each level of gray; at `times`, in seconds, if they are given."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind, options=options) as container:
        stream: Any = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000) if times else Fraction(1, rate)
        for index, level in enumerate(levels):
            frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), level, np.uint8), format="rgb24")
            frame.time_base = stream.codec_context.time_base
            frame.pts = index if times is None else round(times[index] * 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def audio_bytes() -> bytes:
    """Return a file without pictures."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=48_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 48_000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 48_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()
