"""Process videos as Qwen2-VL and Qwen2.5-VL take them: patches of several frames, with times of their own.

    frames       1 2 3 4 5 (5)      the last one is repeated where frames are missing in a patch
    patches      [1 2] [3 4] [5 5]  two frames each: temporal_patch_size
    times         0     2     4     Qwen2.5-VL at 2 frames a second and 2 tokens_per_second; Qwen2-VL counts 0, 1, 2

Each frame is resized and normalised like an image. The processor of transformers needs torchvision, whose bicubic
filter may round a pixel otherwise than Pillow's.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from PIL.Image import Image

from scorepool.engine.errors import InvalidRequest
from scorepool.engine.vision.family import ProcessedImage

MAX_PIXELS = 2**25  # of all frames of a video, when they are resized: 400 MB


class QwenVideos:
    """The videos of a checkpoint; see FamilyVideos."""

    def __init__(self, marker: str, marker_id: int, processor: Any, tokens_per_second: float | None) -> None:
        """Process frames by the checkpoint's processor of images. `tokens_per_second` None: times count patches."""
        self.marker, self.marker_id = marker, marker_id
        self._processor, self._tokens_per_second = processor, tokens_per_second

    def process(self, frames: Iterable[Image], num_frames: int, fps: float) -> ProcessedImage:
        """Resize and normalise frames, and join them to patches; see FamilyVideos."""
        sizes = ("temporal_patch_size", "patch_size", "merge_size")
        size, patch, merge = (int(getattr(self._processor, name)) for name in sizes)
        shape: list[int] = []
        pixels: list[np.ndarray[Any, Any]] = []  # of each frame
        for frame in frames:
            found = self._processor([frame], return_tensors="np")
            _, height, width = found["image_grid_thw"][0].tolist()
            if shape and shape != [height, width]:
                raise InvalidRequest("the frames of a video have several sizes; expected one")
            shape = [height, width]
            if (total := num_frames * height * width * patch**2) > MAX_PIXELS:
                raise InvalidRequest(
                    f"a video of {num_frames} frames has {total} pixels as the model sees it; expected at most "
                    f"{MAX_PIXELS}, of fewer or smaller frames"
                )
            pixels.append(found["pixel_values"].reshape(height * width, -1, size, patch, patch)[:, :, 0].copy())
        pixels += [pixels[-1]] * (-len(pixels) % size)
        joined = [np.stack(pixels[at : at + size], axis=2) for at in range(0, len(pixels), size)]
        arrays = {
            "pixels": np.concatenate(joined).reshape(len(joined) * height * width, -1),
            "grid": np.array([[len(joined), height, width]]),
        }
        grid = height // merge, width // merge
        token_ids = [self.marker_id] * (len(joined) * grid[0] * grid[1])
        return ProcessedImage(arrays, token_ids, grid, self._times(len(joined), size / fps), num_frames)

    def _times(self, num_patches: int, seconds: float) -> tuple[int, ...]:
        """Return the position of each patch in time, given how many seconds it lasts."""
        step = np.float32(1 if self._tokens_per_second is None else self._tokens_per_second * seconds)
        return tuple((np.arange(num_patches, dtype=np.float32) * step).astype(int).tolist())
