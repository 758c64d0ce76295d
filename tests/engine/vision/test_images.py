"""What holds for the images of any family: they are upright, read once, refused by name where they do not go."""

import importlib.util
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from scorepool.engine import Engine, EngineSettings, InvalidRequest, Sequence
from scorepool.engine.certificate import Certificate
from scorepool.engine.images import PlacedImage, digest_of
from scorepool.engine.versions import installed_version
from tests.engine.test_certificate import CERTIFICATE, written
from tests.images import image_bytes
from tests.tiny_models import TinyModels

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")
from scorepool.engine.vision.families import mistral3
from tests.engine.vision.rows import ONE, Vision, check, pixels, scored, shown
from tests.tiny_vision import BUILD, build_gemma3, build_gemma4, build_mistral3, build_smolvlm


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Vision:
    folder = tmp_path_factory.mktemp("mistral3")
    return folder, build_mistral3(folder)


@pytest.fixture(scope="module")
def engine(vision: Vision) -> Iterator[Engine]:
    engine = Engine(EngineSettings(model=str(vision[0])))
    yield engine
    engine.close()


def test_an_image_is_shown_upright(engine: Engine):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned = image_bytes(32, 16, exif=exif.tobytes())
    upright = io.BytesIO()
    Image.open(io.BytesIO(image_bytes(32, 16))).transpose(Image.Transpose.ROTATE_270).save(upright, "PNG")
    assert np.array_equal(pixels(engine, turned), pixels(engine, upright.getvalue()))


def test_an_image_is_digested_once_for_each_row(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    digested: list[bytes] = []
    monkeypatch.setattr(
        "scorepool.engine.vision.codec.digest_of", lambda data: digested.append(data) or digest_of(data)
    )
    data = image_bytes(20, 20, shade=17)
    for expected in (1, 2):
        engine.add([scored(engine, [data])]).result()
        assert digested == [data] * expected


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


def test_a_gemma_3_that_transformers_saved_is_read_like_a_published_one(tmp_path: Path):
    oracle = build_gemma3(tmp_path, is_saved=True)
    engine = Engine(EngineSettings(model=str(tmp_path)))
    try:
        row = scored(engine, [ONE])
        engine.add([row]).result()
        check(row, oracle)
    finally:
        engine.close()


@pytest.mark.parametrize(("end", "expected"), [(2, 2), (3, 3), (5, 3), (9, 9), (10, 10)])
def test_a_chunk_ends_beside_an_image_whose_tokens_attend_ahead(end: int, expected: int):
    image = PlacedImage("d", b"", 3, 9, attends_ahead=True)
    row = Sequence(token_ids=[*range(12)], score_from=10, images=(image,))
    assert row.end_beside_images(0, end) == expected
    assert row.end_beside_images(3, 5) == 9
    assert (
        Sequence(
            token_ids=[*range(12)], score_from=10, images=(replace(image, attends_ahead=False),)
        ).end_beside_images(0, 5)
        == 5
    )


@pytest.mark.parametrize(
    ("family", "file", "changes", "says"),
    [
        ("gemma3", "preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan is true, expected false"),
        ("gemma3", "preprocessor_config.json", {"size": {"height": 16, "width": 16}}, "expected 32 pixels a side"),
        ("gemma3", "preprocessor_config.json", {"do_resize": False}, "do_resize is False, expected True"),
        ("mistral3", "preprocessor_config.json", {"do_resize": False}, "do_resize is False, expected True"),
        ("mistral3", "preprocessor_config.json", {"do_center_crop": True}, "do_center_crop is True, expected False"),
        ("qwen2_5_vl", "preprocessor_config.json", {"do_resize": False}, "do_resize is False, expected True"),
        ("gemma3", "config.json", {"mm_tokens_per_image": 9}, "mm_tokens_per_image is 9, expected a square whose side"),
        ("gemma3", "config.json", {"boi_token_index": 3}, "boi_token_index is 3"),
        ("gemma4", "preprocessor_config.json", {"do_normalize": True}, "do_normalize is True, expected False"),
        ("gemma4", "preprocessor_config.json", {"pooling_kernel_size": 3}, "pooling_kernel_size is 3, expected 2"),
        ("gemma4", "config.json", {"image_token_id": 9999}, "image_token_id is 9999, expected the id of a token"),
        ("smolvlm", "preprocessor_config.json", {"max_image_size": {"longest_edge": 64}}, "max_image_size is 64"),
        ("smolvlm", "preprocessor_config.json", {"do_pad": False}, "do_pad is False, expected True"),
        ("smolvlm", "config.json", {"scale_factor": 3}, "scale_factor is 3, expected a divisor of 8"),
    ],
)
def test_settings_of_images_that_are_not_followed_are_named(
    tmp_path: Path, family: str, file: str, changes: dict[str, object], says: str
):
    BUILD[family](tmp_path)
    (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | changes))
    engine = Engine(EngineSettings(model=str(tmp_path)))
    try:
        assert says in (engine.model_info.images_unsupported or "")
    finally:
        engine.close()


def test_a_gemma_4_with_experts_shows_images(tmp_path: Path):
    oracle = build_gemma4(tmp_path, has_experts=True)
    engine = Engine(EngineSettings(model=str(tmp_path)))
    try:
        row = scored(engine, [ONE])
        engine.add([row]).result()
        assert row.images
        check(row, oracle)
    finally:
        engine.close()


@pytest.mark.parametrize("names", ["transformers", "mlx-vlm"])
def test_a_smolvlm_with_tied_embeddings_is_read_under_either_names(tmp_path: Path, names: str):
    oracle = build_smolvlm(tmp_path, is_tied=True)
    if names == "mlx-vlm":
        weights = mx.load(str(tmp_path / "model.safetensors"))
        renamed = {
            name.removeprefix("model.").replace("text_model.", "language_model."): weights[name] for name in weights
        }
        mx.save_safetensors(str(tmp_path / "model.safetensors"), renamed, {"format": "mlx"})
    engine = Engine(EngineSettings(model=str(tmp_path)))
    try:
        row = scored(engine, [ONE])
        engine.add([row]).result()
        assert row.images
        check(row, oracle)
    finally:
        engine.close()


def test_a_tower_that_was_packed_for_other_engines_is_refused_by_name(tmp_path: Path):
    build_mistral3(tmp_path)
    weights = mx.load(str(tmp_path / "model.safetensors"))
    name = next(name for name in weights if "vision_tower" in name and name.endswith("q_proj.weight"))
    weights[name.replace(".weight", ".qweight")] = weights.pop(name)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "pt"})
    engine = Engine(EngineSettings(model=str(tmp_path)))
    try:
        assert "q_proj.qweight: the weights of the vision tower are packed" in engine.model_info.images_unsupported
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


def test_results_name_what_shows_images_and_a_certificate_of_texts_holds_whatever_that_is(tmp_path: Path):
    build_mistral3(tmp_path)
    engine = Engine(EngineSettings(model=str(tmp_path)))
    engine.close()
    info = engine.model_info
    assert info.versions.keys() == {"mlx", "mlx-lm", "av", "mlx-vlm", "pillow", "transformers"}
    identity = {name: getattr(info, name) for name in ("fingerprint", "dtype", "mode", "backend")}
    identity["versions"] = {name: installed_version(name) for name in ("scorepool", "mlx", "mlx-lm")}
    written(tmp_path, Certificate(**asdict(CERTIFICATE) | identity))
    certified = Engine(EngineSettings(model=str(tmp_path), require_certificate=True))
    certified.close()
    assert certified.model_info.images == "mistral3"


def test_a_tower_whose_features_do_not_fit_the_tokens_is_refused_when_it_is_loaded(
    vision: Vision, monkeypatch: pytest.MonkeyPatch
):
    process = mistral3.Images.process

    def process_too_small(self: mistral3.Images, image: Image.Image) -> object:
        processed = process(self, image)
        return replace(processed, token_ids=processed.token_ids[1:])

    monkeypatch.setattr(mistral3.Images, "process", process_too_small)
    engine = Engine(EngineSettings(model=str(vision[0])))
    try:
        assert "the tower computes 12 features of an image that has 11 tokens" in engine.model_info.images_unsupported
    finally:
        engine.close()
