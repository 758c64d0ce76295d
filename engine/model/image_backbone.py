"""Let features of images stand for embeddings of tokens, in forward passes of a model of texts."""

from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module

from scorepool.engine.errors import LoadError
from scorepool.engine.images import PlacedImage
from scorepool.engine.model.axial_positions import AxialPositions
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.sequence import Sequence

EMBEDDINGS = ".embed_tokens"


class ImageEncoder(Protocol):
    """What computes the features of images: see vision/encoder.py."""

    marker_id: int  # the token whose embedding is replaced by a feature

    def features(self, image: PlacedImage) -> mx.array:
        """Return [n, width]: a feature for each such token of the image."""


class EmbeddingTap:
    """A model's embeddings, of which some can be replaced. Not thread-safe, like the model."""

    def __init__(self, model: Module) -> None:
        """Take the model's only embeddings. Raises LoadError."""
        found = [module for name, module in model.named_modules() if name.endswith(EMBEDDINGS)]
        if len(found) != 1:
            raise LoadError(f"the model has {len(found)} embeddings of tokens; images need one")
        self._replaced: tuple[mx.array, mx.array, mx.array] | None = None
        tap, kind = self, type(found[0])

        class TappedEmbedding(kind):  # type: ignore[misc, valid-type]
            def __call__(self, token_ids: mx.array) -> mx.array:
                embedded: mx.array = kind.__call__(self, token_ids)
                if tap._replaced is not None:
                    rows, columns, values = tap._replaced
                    embedded[rows, columns] = values.astype(embedded.dtype)
                return embedded

        found[0].__class__ = TappedEmbedding

    def replace(self, rows: list[int], columns: list[int], values: list[mx.array]) -> None:
        """Let values [n, width], together as many as rows and columns, stand at these places until `clear`."""
        self._replaced = mx.array(rows), mx.array(columns), mx.concatenate(values)

    def clear(self) -> None:
        """Let the embeddings be those of tokens again."""
        self._replaced = None


class ImageBackbone:
    """A model split in two, whose sequences may show images; see BackboneAndHead."""

    def __init__(
        self, model: Module, split: BackboneAndHead, encoder: ImageEncoder, axes: AxialPositions | None = None
    ) -> None:
        """Tap the model's embeddings. Without `axes`, its positions are the numbers of tokens. Raises LoadError."""
        self._split, self._encoder, self._axes = split, encoder, axes
        self._tap = EmbeddingTap(model)

    def forward_hidden(
        self,
        token_ids: mx.array,
        cache: list[Any] | None = None,
        sequences: list[Sequence] | None = None,
        starts: list[int] | None = None,
    ) -> mx.array:
        """Return hidden states, with features of images where `starts` say that rows show some; see BackboneAndHead."""
        if sequences is None or not any(sequence.images for sequence in sequences):
            return self._split.forward_hidden(token_ids, cache, sequences)
        if starts is not None:
            self._place(sequences, starts, token_ids.shape[1])
        elif self._axes is not None:
            self._axes.shift(sequences)
        try:
            return self._split.forward_hidden(token_ids, cache, sequences)
        finally:
            self._tap.clear()
            if self._axes is not None:
                self._axes.clear()

    def compute_logits(self, rows: mx.array) -> mx.array:
        """Return the head of hidden states; see BackboneAndHead."""
        return self._split.compute_logits(rows)

    def _place(self, sequences: list[Sequence], starts: list[int], length: int) -> None:
        """Replace the embeddings of the tokens from each start on that stand for features."""
        rows: list[int] = []
        columns: list[int] = []
        values: list[mx.array] = []
        for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
            for image in sequence.images:
                places = self._places(sequence, image)
                first = sum(place < start for place in places)
                end = sum(place < start + length for place in places)
                if first < end:
                    rows += [row] * (end - first)
                    columns += [place - start for place in places[first:end]]
                    values.append(self._encoder.features(image)[first:end])
        if rows:
            self._tap.replace(rows, columns, values)
        if self._axes is not None:
            self._axes.place(sequences, starts, length)

    def _places(self, sequence: Sequence, image: PlacedImage) -> list[int]:
        """Return the positions of the image's features, in their order."""
        tokens = range(image.start, image.end)
        return [place for place in tokens if sequence.token_ids[place] == self._encoder.marker_id]
