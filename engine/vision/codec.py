"""Decode images with Pillow and process them as the checkpoint says, within a bounded memory. No MLX; any thread."""

import warnings
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import closing
from io import BytesIO
from threading import Lock

from PIL import Image, ImageOps

from scorepool.engine.errors import InvalidRequest, describe
from scorepool.engine.images import ImageTokens, Shown, Video, VideoFile, digest_of
from scorepool.engine.vision.family import FamilyImages, FamilyVideos, ProcessedImage
from scorepool.engine.vision.jpeg_scans import num_scans
from scorepool.engine.vision.video_file import SampledFrames

MAX_BYTES = 2**28  # of processed images that are kept until their features are computed
MAX_PIXELS = 2**26  # of one image; who gives images checks their headers against less
MAX_SCANNED_PIXELS = 2**30  # of all scans of a JPEG file: about two seconds
MAX_FRAME_BYTES = 2**27  # of the frames of a video file that become images, as files
_JPEG = b"\xff\xd8\xff"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


class ImageProcessor:
    """The images of one model: an ImageCodec. Processes an image that was dropped again."""

    def __init__(self, images: FamilyImages, max_frames: int) -> None:
        """Start without images. At most `max_frames` are sampled from the file of a video."""
        self._images, self._max_frames = images, max_frames
        self.family, self.injection = images.name, images.injection
        self.marker, self.spelled_marker = images.marker, images.spelled_marker
        self.marker_id = images.marker_id
        self._videos: FamilyVideos | None = getattr(images, "videos", None)
        self.video_marker = self._videos.marker if self._videos else None
        self.video_marker_id = self._videos.marker_id if self._videos else None
        self.feature_ids = frozenset({images.feature_id} | ({self._videos.marker_id} if self._videos else set()))
        self._decoding = Lock()  # lets one image be decoded at a time, and guards the last video
        self._last_video: tuple[str, list[bytes]] = ("", [])  # a digest, and the frames; items of a job share a video
        self._lock = Lock()  # guards the two below, for a moment
        self._kept: OrderedDict[str, ProcessedImage] = OrderedDict()  # by digest, least recently used first
        self._num_bytes = 0

    def tokens_of(self, data: Shown) -> ImageTokens:
        """Return the tokens that stand for an image or a video; see ImageCodec."""
        digest = digest_of(data)
        with self._decoding:
            processed = self.process(digest, data)
        shape = processed.grid, processed.times, processed.num_frames
        return ImageTokens(digest, data, processed.token_ids, *shape)

    def frames_of(self, video: Video | VideoFile) -> Sequence[bytes]:
        """Return the frames of a video as files of images; see ImageCodec."""
        if isinstance(video, Video):
            return video.frames
        digest = digest_of(video)
        with self._decoding:
            if digest != self._last_video[0]:
                self._last_video = digest, _frame_files(video, self._max_frames)
            return self._last_video[1]

    def process(self, digest: str, data: Shown) -> ProcessedImage:
        """Return an image or a video, given with its digest, as the vision tower takes it.

        Never waits for another one that is decoded. Raises InvalidRequest if it cannot be decoded.
        """
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
                return self._kept[digest]
        processed = self._process(data)
        with self._lock:
            if digest not in self._kept:
                self._kept[digest] = processed
                self._num_bytes += processed.num_bytes
            while self._num_bytes > MAX_BYTES and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._num_bytes -= dropped.num_bytes
            return processed

    def release(self, digest: str) -> None:
        """Let an image be dropped before all others: its features are computed."""
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest, last=False)

    def sample(self) -> ProcessedImage:
        """Return an image of its own, of a size that no checkpoint's images have."""
        return self._images.process(Image.linear_gradient("L").resize((53, 41)).convert("RGB"))

    def _process(self, data: Shown) -> ProcessedImage:
        try:
            return self._process_any(data)
        except InvalidRequest:
            raise
        except Exception as error:  # any: what processors raise on sizes that they do not expect
            what = "an image" if isinstance(data, bytes) else "a video"
            raise InvalidRequest(
                f"{what} cannot be resized as the model's processor does: {describe(error)}"
            ) from error

    def _process_any(self, data: Shown) -> ProcessedImage:
        if isinstance(data, bytes):
            return self._images.process(decode(data))
        if self._videos is None:
            raise InvalidRequest(f"models of the family {self.family} take no videos; expected images, such as frames")
        if not isinstance(data, VideoFile):
            return self._videos.process(map(decode, data.frames), len(data.frames), data.fps)
        with closing(SampledFrames(data, self._max_frames)) as sampled:
            return self._videos.process(sampled, sampled.num_frames, data.fps)


def _frame_files(video: VideoFile, max_frames: int) -> list[bytes]:
    """Return sampled frames as PNG files. Raises InvalidRequest."""
    files: list[bytes] = []
    num_bytes = 0
    with closing(SampledFrames(video, max_frames)) as sampled:
        for frame in sampled:
            file = BytesIO()
            frame.save(file, "PNG", compress_level=1)
            files.append(file.getvalue())
            num_bytes += len(files[-1])
            if num_bytes > MAX_FRAME_BYTES:
                raise InvalidRequest(
                    f"the frames of a video have more than {MAX_FRAME_BYTES} bytes as images; expected fewer, with a "
                    "lower `fps`, or smaller ones"
                )
    return files


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB: what is transparent on white, as vLLM shows it, and of 16 bits of gray the upper 8."""
    if image.mode.startswith("I"):  # Pillow would show all values above 255 as white
        return image.point(lambda value: value / 256).convert("L").convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    shown = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(shown, mask=shown.getchannel("A"))
    return white


def decode(data: bytes) -> Image.Image:
    """Return an image upright in RGB; of an animation its first frame. Raises InvalidRequest."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged metadata, and of sizes that are checked below
            with Image.open(BytesIO(data), formats=FORMATS) as opened:
                width, height = opened.size
                if width * height > MAX_PIXELS:
                    raise InvalidRequest(f"an image has {width} x {height} pixels; expected at most {MAX_PIXELS}")
                if data.startswith(_JPEG) and (scans := num_scans(data)) * width * height > MAX_SCANNED_PIXELS:
                    raise InvalidRequest(
                        f"an image of {width} x {height} pixels has {scans} scans; expected at most "
                        f"{MAX_SCANNED_PIXELS // (width * height)}, of a file that was saved again"
                    )
                return _to_rgb(ImageOps.exif_transpose(opened))
    except InvalidRequest:
        raise
    except Exception as error:  # any: what decoders raise on damaged files
        raise InvalidRequest(f"an image cannot be decoded: {type(error).__name__}: {error}") from error
