"""Rows that show images, and what transformers says of them."""

from pathlib import Path

import numpy as np

from scorepool.engine import Engine, Sampling, Sequence
from scorepool.engine.images import PlacedImage, digest_of, expand
from tests.images import image_bytes
from tests.vision_oracles import VisionOracle

TOLERANCE = 1e-4
ONE, OTHER = image_bytes(32, 24), image_bytes(32, 24, shade=90)
TALL = image_bytes(11, 30, kind="JPEG")
TAIL = " jumps over the lazy dog"
Vision = tuple[Path, VisionOracle]


def shown(engine: Engine, text: str, images: list[bytes]) -> tuple[list[int], tuple[PlacedImage, ...]]:
    codec = engine.chat.images
    if codec is None:
        return engine.tokenizer.encode(text)[0], ()
    token_ids, _ = engine.tokenizer.encode(text.replace("[IMG]", codec.spelled_marker))
    return expand(codec, token_ids, [codec.tokens_of(data) for data in images])


def pixels(engine: Engine, data: bytes) -> np.ndarray:
    arrays = engine.chat.images.process(digest_of(data), data).arrays
    return arrays["pixels"] if "pixels" in arrays else arrays["patches"]


def scored(engine: Engine, images: list[bytes], text: str = "look: [IMG] the fox", tail: str = TAIL) -> Sequence:
    token_ids, placed = shown(engine, text, images)
    ends = engine.tokenizer.encode(tail, add_bos=False)[0]
    return Sequence(token_ids=token_ids + ends, score_from=len(token_ids), images=placed, top_logprobs=3)


def generated(engine: Engine, images: list[bytes], text: str = "look: [IMG] the fox") -> Sequence:
    token_ids, placed = shown(engine, text, images)
    sampling = Sampling(max_tokens=9, temperature=0, ignore_eos=True, seed=0)
    return Sequence(token_ids=token_ids, images=placed, sampling=sampling)


def check(sequence: Sequence, oracle: VisionOracle) -> None:
    logprobs = oracle.logprobs(sequence.token_ids, [image.data for image in sequence.images])
    positions = range(sequence.first_reported, len(sequence.token_ids))
    assert len(positions) == len(sequence.columns.logprobs) > 0
    for position, found in zip(positions, sequence.columns.logprobs, strict=True):
        assert abs(found - logprobs[position - 1, sequence.token_ids[position]]) <= TOLERANCE
    for position, ids, values in zip(positions, sequence.columns.top_ids, sequence.columns.top_logprobs, strict=False):
        assert np.abs(np.array(values) - logprobs[position - 1, list(ids)]).max() <= TOLERANCE
    if sequence.sampling:
        first = sequence.num_input_tokens
        assert sequence.token_ids[first:] == logprobs[first - 1 : -1].argmax(axis=-1).tolist()
