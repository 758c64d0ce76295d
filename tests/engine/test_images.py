"""A model that takes images: its numbers are transformers', alone, beside rows of texts, in chunks, from caches."""

import importlib
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scorepool.engine import Engine, EngineSettings, InvalidRequest, Sampling, Sequence, core
from scorepool.engine.images import PlacedImage, expand
from tests.engine.test_speculation import ScriptedSpeculator, key_of
from tests.images import image_bytes
from tests.tiny_models import TinyModels

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")
from tests.tiny_vision import VisionOracle, build_mistral3, build_qwen2_5_vl, build_qwen2_vl

TOLERANCE = 1e-4
ONE, OTHER = image_bytes(32, 24), image_bytes(32, 24, shade=90)
TALL = image_bytes(11, 30, kind="JPEG")
TAIL = " jumps over the lazy dog"
Vision = tuple[Path, VisionOracle]


BUILD = {"mistral3": build_mistral3, "qwen2_5_vl": build_qwen2_5_vl, "qwen2_vl": build_qwen2_vl}


@pytest.fixture(scope="module", params=[*BUILD])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def vision(family: str, tmp_path_factory: pytest.TempPathFactory) -> Vision:
    folder = tmp_path_factory.mktemp(family)
    return folder, BUILD[family](folder)


@pytest.fixture(scope="module")
def engine(vision: Vision) -> Iterator[Engine]:
    engine = Engine(EngineSettings(model=str(vision[0])))
    yield engine
    engine.close()


def shown(engine: Engine, text: str, images: list[bytes]) -> tuple[list[int], tuple[PlacedImage, ...]]:
    codec = engine.chat.images
    if codec is None:
        return engine.tokenizer.encode(text)[0], ()
    return expand(codec, engine.tokenizer.encode(text.replace("[IMG]", codec.marker))[0], images)


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


@pytest.mark.parametrize("size", [(32, 24), (24, 32), (8, 8), (5, 31), (64, 64), (300, 40), (33, 33)])
def test_tokens_and_pixels_of_an_image_are_transformers(vision: Vision, engine: Engine, size: tuple[int, int]):
    _, oracle = vision
    data = image_bytes(*size)
    assert shown(engine, "[IMG]a", [data])[0][1:] == oracle.token_ids(f"{oracle.marker}a", [data])
    found, expected = engine.chat.images.process(data).arrays["pixels"], oracle.processed([data])["pixel_values"]
    assert np.abs(found - expected.numpy()).max() < 1e-5


def test_rows_with_images_beside_rows_of_texts_have_transformers_logprobs(vision: Vision, engine: Engine):
    _, oracle = vision
    two = "look: [IMG] and [IMG][IMG]!"
    texts = [scored(engine, [], "the quick brown fox"), generated(engine, [], "a token")]
    rows = [
        *(scored(engine, [ONE]), scored(engine, [OTHER]), scored(engine, [ONE, TALL, OTHER], two)),
        *(generated(engine, [ONE]), generated(engine, [TALL]), generated(engine, [OTHER, ONE, TALL], two)),
    ]
    engine.add([*rows, *texts]).result()
    alone = scored(engine, [TALL])
    engine.add([alone]).result()
    for row in (*rows, *texts, alone):
        check(row, oracle)
    assert rows[0].token_ids == rows[1].token_ids
    assert abs(rows[0].columns.logprobs[0] - rows[1].columns.logprobs[0]) > 100 * TOLERANCE  # the image counts


def test_a_cached_prefix_belongs_to_its_images(vision: Vision, engine: Engine):
    """Rows of equal tokens continue from a prefix that was computed for the same images only."""
    _, oracle = vision
    text = "a prompt with an image [IMG] in it, and some more words after it"
    tails = [" one", " two", " the dog", " a fox", " in the sun"]
    groups = {data: [scored(engine, [data], text, tail) for tail in tails] for data in (ONE, OTHER, TALL)}
    for _ in range(2):
        for rows in groups.values():
            engine.add(rows).result()
            again = [generated(engine, [image.data for image in rows[0].images], text) for _ in range(2)]
            engine.add(again).result()
            for row in (*rows, *again):
                check(row, oracle)
            assert all(row.num_cached > rows[0].images[0].end for row in again)
        groups = {data: [scored(engine, [data], text, tail) for tail in tails] for data in groups}


def test_rows_with_images_beside_rows_that_verify_proposed_tokens(
    vision: Vision, engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    """Nothing is proposed to rows with images. They are padded beside the others, and drop the padding."""
    folder, oracle = vision
    made: list[ScriptedSpeculator] = []
    monkeypatch.setattr(core, "Speculator", lambda *arguments: made.append(ScriptedSpeculator(*arguments)) or made[0])
    texts = {"look: [IMG] the fox": [ONE], "[IMG] and [IMG]": [OTHER, TALL], "a fox": [], "the dog and": [], "x": []}
    plain, rows = ([generated(engine, images, text) for text, images in texts.items()] for _ in range(2))
    engine.add(plain).result()
    speculating = Engine(EngineSettings(model=str(folder), speculation="ngram"))
    try:
        made[0].script = {key_of(row): list(row.token_ids) for row in plain if not row.images}
        speculating.add([*rows, scored(engine, [ONE])]).result()
    finally:
        speculating.close()
    for row in rows:
        check(row, oracle)
    assert sum(made[0].accepted) > 0
    assert {row.proposes_by("ngram") for row in rows} == {"ngram", None}


@pytest.mark.parametrize("max_batch_tokens", [7, 16])
def test_a_prompt_in_chunks_that_cut_images(vision: Vision, max_batch_tokens: int):
    folder, oracle = vision
    engine = Engine(EngineSettings(model=str(folder), max_batch_tokens=max_batch_tokens))
    try:
        rows = [scored(engine, [ONE, OTHER], "x [IMG][IMG] y"), generated(engine, [OTHER]), scored(engine, [ONE])]
        engine.add(rows).result()
        for row in rows:
            check(row, oracle)
    finally:
        engine.close()


def test_features_are_computed_once_for_each_image(engine: Engine, family: str, monkeypatch: pytest.MonkeyPatch):
    tower = importlib.import_module(f"scorepool.engine.vision.{family}").Tower
    encoded: list[object] = []
    encode = tower.encode

    def counting(self: object, processed: object) -> object:
        encoded.append(processed)
        return encode(self, processed)

    monkeypatch.setattr(tower, "encode", counting)
    data = image_bytes(30, 30, shade=5)
    for _ in range(2):
        engine.add(
            [scored(engine, [data]), scored(engine, [data, data], "[IMG] [IMG]"), generated(engine, [data])]
        ).result()
    assert len(encoded) == 1


def test_an_image_is_shown_upright(engine: Engine):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned = image_bytes(32, 16, exif=exif.tobytes())
    upright = io.BytesIO()
    Image.open(io.BytesIO(image_bytes(32, 16))).transpose(Image.Transpose.ROTATE_270).save(upright, "PNG")
    codec = engine.chat.images
    assert np.array_equal(codec.process(turned).arrays["pixels"], codec.process(upright.getvalue()).arrays["pixels"])


def test_what_was_not_tested_with_images_is_refused_by_name(engine: Engine, tiny_models: TinyModels):
    row = scored(engine, [ONE])
    assert row.images
    for changes, says in (
        ({"score_from": row.images[0].end - 1}, "the tokens of images have no logprobs"),
        ({"score_from": None, "pooling": "last"}, "is to be embedded"),
        ({"adapter_name": "a", "score_from": row.score_from}, "names an adapter"),
        ({"keep_pct": 20.0, "score_from": row.score_from}, "keep_pct"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            engine.add([Sequence(token_ids=list(row.token_ids), images=row.images, **changes)])
    text = Engine(EngineSettings(model=str(tiny_models("llama"))))
    try:
        assert (text.chat.images, text.model_info.images, text.model_info.images_unsupported) == (None, None, None)
        with pytest.raises(InvalidRequest, match="expected none: it is a model of texts"):
            text.add([Sequence(token_ids=[3, 4, 5], score_from=2, images=(PlacedImage("d", ONE, 0, 1),))])
    finally:
        text.close()


@pytest.mark.parametrize("data", [b"", b"hello", ONE[:60], b"\xff\xd8\xff\xe0" + bytes(40), ONE[:30] + b"\xff" * 500])
def test_a_damaged_image_is_refused(engine: Engine, data: bytes):
    with pytest.raises(InvalidRequest, match="an image cannot be decoded"):
        shown(engine, "[IMG]", [data])


@pytest.mark.parametrize(
    ("changes", "settings", "says"),
    [
        ({"vision_feature_layer": -2}, {}, "vision_feature_layer is -2, expected -1"),
        ({"image_token_index": 3}, {}, "image_token_index is 3"),
        ({}, {"mode": "exact"}, "the worker runs in exact mode"),
    ],
)
def test_a_checkpoint_whose_images_cannot_be_served_serves_texts(
    tmp_path: Path, changes: dict[str, object], settings: dict[str, str], says: str
):
    oracle = build_mistral3(tmp_path, **changes)
    engine = Engine(EngineSettings(model=str(tmp_path), **settings))
    try:
        assert engine.chat.images is engine.model_info.images is None
        assert says in (engine.model_info.images_unsupported or "")
        row = scored(engine, [], "the quick brown fox")
        engine.add([row]).result()
        check(row, oracle)
    finally:
        engine.close()


def test_other_weights_see_otherwise(vision: Vision, family: str, tmp_path: Path):
    """Dropped and pushed weights take their vision tower with them."""
    folder, oracle = vision
    other = BUILD[family](tmp_path, seed=1)
    engine = Engine(EngineSettings(model=str(folder)))
    try:
        for expected in (oracle, oracle, other):
            if expected is other:
                engine.stage_weights(str(tmp_path), 1).result()
                engine.switch_weights().result().result()
            row = scored(engine, [ONE])
            engine.add([row]).result()
            check(row, expected)
            engine.drop_weights().result()
    finally:
        engine.close()


def test_without_the_extra_images_are_refused_by_name(vision: Vision, monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    opening = "scorepool.engine.model.images.find_spec"
    monkeypatch.setattr(opening, lambda name: None if name == "mlx_vlm" else find(name))
    engine = Engine(EngineSettings(model=str(vision[0])))
    try:
        assert engine.chat.images_unsupported == "the worker is installed without the extra `vision`"
    finally:
        engine.close()
