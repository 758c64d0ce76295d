"""Decode images with Pillow and process them as the checkpoint says, within a bounded memory. No MLX; any thread."""

import warnings
from collections import OrderedDict
from io import BytesIO
from threading import Lock

from PIL import Image, ImageOps

from scorepool.engine.errors import InvalidRequest
from scorepool.engine.images import ImageTokens, digest_of
from scorepool.engine.vision.family import FamilyImages, ProcessedImage

MAX_BYTES = 2**28  # of processed images that are kept until their features are computed
MAX_PIXELS = 2**26  # of one image; who gives images checks their headers against less
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


class ImageProcessor:
    """The images of one model: an ImageCodec. Processes an image that was dropped again."""

    def __init__(self, images: FamilyImages) -> None:
        """Start without images."""
        self._images = images
        self.family, self.injection = images.name, images.injection
        self.marker, self.spelled_marker = images.marker, images.spelled_marker
        self.marker_id, self.feature_id = images.marker_id, images.feature_id
        self._lock = Lock()  # guards the two below, and lets one image be decoded at a time
        self._kept: OrderedDict[str, ProcessedImage] = OrderedDict()  # by digest, least recently used first
        self._num_bytes = 0

    def tokens_of(self, data: bytes) -> ImageTokens:
        """Return the tokens that stand for an image; see ImageCodec."""
        digest = digest_of(data)
        processed = self.process(digest, data)
        return ImageTokens(digest, data, processed.token_ids, processed.grid)

    def process(self, digest: str, data: bytes) -> ProcessedImage:
        """Return an image, given with its digest, as the vision tower takes it.

        Raises InvalidRequest if it cannot be decoded.
        """
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
                return self._kept[digest]
            processed = self._kept[digest] = self._images.process(decode(data))
            self._num_bytes += processed.num_bytes
            while self._num_bytes > MAX_BYTES and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._num_bytes -= dropped.num_bytes
            return processed


def decode(data: bytes) -> Image.Image:
    """Return an image upright in RGB; of an animation its first frame. Raises InvalidRequest."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged metadata, and of sizes that are checked below
            with Image.open(BytesIO(data), formats=FORMATS) as opened:
                width, height = opened.size
                if width * height > MAX_PIXELS:
                    raise InvalidRequest(f"an image has {width} x {height} pixels; expected at most {MAX_PIXELS}")
                return ImageOps.exif_transpose(opened).convert("RGB")
    except InvalidRequest:
        raise
    except Exception as error:  # any: what decoders raise on damaged files
        raise InvalidRequest(f"an image cannot be decoded: {type(error).__name__}: {error}") from error
