"""Let sequences show images in forward passes of a model of texts.

The tokens that stand for an image's features are replaced by these, and the rest follows from the family's Injection:

    features             stand for embeddings, or are added after early layers    feature_taps.py
    positions            on several axes                                           axial_positions.py
    attention            among the tokens of one image                             image_attention.py
"""

from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module

from scorepool.engine.images import Injection, PlacedImage
from scorepool.engine.model.axial_positions import AxialPositions
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.feature_taps import Features, LayerInputTap, tap_features
from scorepool.engine.model.image_attention import ImageAttention
from scorepool.engine.sequence import Sequence


class ImageEncoder(Protocol):
    """What computes the features of images: see vision/encoder.py."""

    feature_ids: frozenset[int]  # the tokens that stand for features: of images, of videos

    def features(self, image: PlacedImage) -> mx.array:
        """Return [n, width]: what such tokens of the image have; widths of several layers stand side by side."""


class ImageBackbone:
    """A model split in two, whose sequences may show images; see BackboneAndHead."""

    def __init__(self, model: Module, split: BackboneAndHead, encoder: ImageEncoder, injection: Injection) -> None:
        """Tap what images change in the model. Raises LoadError."""
        self._split, self._encoder = split, encoder
        self._taps = tap_features(model, injection.num_deep_layers)
        self._axes = AxialPositions(model, injection.axes) if injection.axes else None
        self._attention = (
            ImageAttention(model, only_sliding=injection.only_sliding_ahead) if injection.attends_ahead else None
        )
        token_id = injection.layer_input_id
        self._layer_inputs = None if token_id is None else LayerInputTap(model, token_id)

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
            self._clear()

    def compute_logits(self, rows: mx.array) -> mx.array:
        """Return the head of hidden states; see BackboneAndHead."""
        return self._split.compute_logits(rows)

    def _clear(self) -> None:
        for tap in self._taps:
            tap.clear()
        if self._axes is not None:
            self._axes.clear()
        if self._attention is not None:
            self._attention.clear()
        if self._layer_inputs is not None:
            self._layer_inputs.clear()

    def _place(self, sequences: list[Sequence], starts: list[int], length: int) -> None:
        """Tell the taps which tokens from each start on stand for features."""
        rows: list[int] = []
        columns: list[int] = []
        values: list[mx.array] = []
        spans: list[tuple[int, list[int]]] = []
        for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
            for image in sequence.images:
                positions = self._positions(sequence, image)
                first = sum(position < start for position in positions)
                end = sum(position < start + length for position in positions)
                if first < end:
                    spans.append((row, [position - start for position in positions[first:end]]))
                    rows += [row] * (end - first)
                    columns += spans[-1][1]
                    values.append(self._encoder.features(image)[first:end])
        if rows:
            places = mx.array(rows), mx.array(columns)
            by_layer = mx.concatenate(values).split(len(self._taps), axis=1)
            for tap, own in zip(self._taps, by_layer, strict=True):
                tap.place(Features(*places, own))
            if self._layer_inputs is not None:
                self._layer_inputs.place(*places)
        if self._axes is not None:
            self._axes.place(sequences, starts, length)
        if self._attention is not None:
            self._attention.place(spans, len(sequences), length)

    def _positions(self, sequence: Sequence, image: PlacedImage) -> list[int]:
        """Return the positions of the image's features, in their order."""
        tokens = range(image.start, image.end)
        return [position for position in tokens if sequence.token_ids[position] in self._encoder.feature_ids]
