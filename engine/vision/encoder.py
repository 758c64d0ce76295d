"""Compute the features of images, and keep those of the last ones within a bounded memory. On the MLX thread."""

from collections import OrderedDict

import mlx.core as mx

from scorepool.engine.errors import LoadError
from scorepool.engine.images import PlacedImage
from scorepool.engine.vision.codec import ImageProcessor
from scorepool.engine.vision.family import FamilyTower

MAX_BYTES = 2**27


class ImageEncoder:
    """The vision tower of one model."""

    def __init__(self, tower: FamilyTower, processor: ImageProcessor) -> None:
        """Start without features."""
        self._tower, self._processor = tower, processor
        self.feature_ids = processor.feature_ids
        self._kept: OrderedDict[str, mx.array] = OrderedDict()  # by the image's digest, least recently used first
        self._num_bytes = 0
        self._check(processor)

    def _check(self, processor: ImageProcessor) -> None:
        """Compute the features of an image. Raises LoadError if they are not as many as its tokens for them."""
        processed = processor.sample()
        features = self._tower.encode(processed)
        mx.eval(features)
        expected = sum(token_id in self.feature_ids for token_id in processed.token_ids)
        if features.shape[0] != expected:
            raise LoadError(f"the tower computes {features.shape[0]} features of an image that has {expected} tokens")

    def features(self, image: PlacedImage) -> mx.array:
        """Return [n, width]: what each token of the image has that stands for a feature; see FamilyTower."""
        found = self._kept.get(image.digest)
        if found is None:
            found = self._kept[image.digest] = self._tower.encode(self._processor.process(image.digest, image.data))
            mx.eval(found)
            self._processor.release(image.digest)
            self._num_bytes += found.nbytes
        self._kept.move_to_end(image.digest)
        while self._num_bytes > MAX_BYTES and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self._num_bytes -= dropped.nbytes
        return found
