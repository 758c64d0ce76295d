"""Each family's numbers are transformers': alone, beside texts, in chunks, from caches, after a push, in 4 bits."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from scorepool.engine import Engine, EngineSettings, core
from tests.engine.test_speculation import ScriptedSpeculator, key_of
from tests.images import image_bytes

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")
from tests.engine.vision.rows import ONE, OTHER, TALL, TOLERANCE, Vision, check, generated, pixels, scored, shown
from tests.tiny_vision import BUILD

_PUSHED = {"qwen3_vl", "gemma3", "small gemma4"}  # of each way into a language model one; of others by soak


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


@pytest.mark.parametrize("size", [(32, 24), (24, 32), (8, 8), (5, 31), (64, 64), (300, 40), (33, 33)])
def test_tokens_and_pixels_of_an_image_are_transformers(vision: Vision, engine: Engine, size: tuple[int, int]):
    _, oracle = vision
    data = image_bytes(*size)
    assert shown(engine, "[IMG]a", [data])[0][1:] == oracle.token_ids(f"{oracle.marker}a", [data])
    found = pixels(engine, data)
    expected = oracle.processed([data])["pixel_values"].numpy().reshape(-1, *found.shape[1:])
    assert np.abs(found - expected[: len(found)]).max() < 1e-5  # the rest is padding
    assert not expected[len(found) :].any()


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
    groups = {data: [scored(engine, [data], text, tail) for tail in tails] for data in (ONE, OTHER)}
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


def test_features_are_computed_once_for_each_image(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    tower = importlib.import_module(f"scorepool.engine.vision.families.{engine.model_info.images}").Tower
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


@pytest.mark.parametrize(
    "pushed", [pytest.param(one, marks=() if one in _PUSHED else pytest.mark.soak) for one in BUILD]
)
def test_other_weights_see_otherwise(pushed: str, tmp_path: Path):
    """Dropped and pushed weights take their vision tower with them."""
    folders = tmp_path / "first", tmp_path / "other"
    oracle, other = (BUILD[pushed](folder, seed=seed) for seed, folder in enumerate(folders))
    engine = Engine(EngineSettings(model=str(folders[0])))
    try:
        for expected in (oracle, oracle, other):
            if expected is other:
                engine.stage_weights(str(folders[1]), 1).result()
                engine.switch_weights().result().result()
            row = scored(engine, [ONE])
            engine.add([row]).result()
            check(row, expected)
            engine.drop_weights().result()
    finally:
        engine.close()


def test_quantised_weights_of_language_model_and_tower(family: str, tmp_path: Path):
    oracle = BUILD[family](tmp_path, bits=4)
    engine = Engine(EngineSettings(model=str(tmp_path)))
    try:
        rows = [scored(engine, [ONE, TALL], "x [IMG][IMG] y"), generated(engine, [OTHER]), scored(engine, [], "a fox")]
        engine.add(rows).result()
        assert engine.model_info.quantization is not None
        for row in rows:
            check(row, oracle)
    finally:
        engine.close()
