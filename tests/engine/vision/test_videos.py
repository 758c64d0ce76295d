"""Videos as frames: numbers are those of transformers with the same frames, alone, beside others and in chunks."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from scorepool.engine import ContextLengthExceeded, Engine, EngineSettings, InvalidRequest, Sampling, Sequence
from scorepool.engine.images import Shown, Video, expand
from tests.images import image_bytes

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")
from tests.tiny_vision import build_mistral3, build_qwen2_5_vl, build_qwen2_vl
from tests.vision_oracles import QwenOracle, VisionOracle

TOLERANCE = 1e-4
FRAMES = tuple(image_bytes(32, 24, shade=shade) for shade in (0, 40, 90, 140, 200))
SHORT = Video(FRAMES[:2], 2.0)
LONG = Video(FRAMES, 1.0)  # its time goes beyond its rows and columns
PICTURE = image_bytes(24, 32, shade=60)
TAIL = " jumps over the lazy dog"
BUILD = {"qwen2_5_vl": build_qwen2_5_vl, "qwen2_vl": build_qwen2_vl}


@pytest.fixture(scope="module", params=[*BUILD])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def oracle(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, VisionOracle]:
    folder = tmp_path_factory.mktemp(family)
    return folder, BUILD[family](folder)


@pytest.fixture(scope="module")
def engine(oracle: tuple[Path, VisionOracle]) -> Iterator[Engine]:
    engine = Engine(EngineSettings(model=str(oracle[0]), max_batch_tokens=2048))
    yield engine
    engine.close()


def scored(engine: Engine, shown: list[Shown], text: str, tail: str = TAIL) -> Sequence:
    codec = engine.chat.images
    assert codec is not None
    assert codec.video_marker is not None
    text = text.replace("[IMG]", codec.marker).replace("[VIDEO]", codec.video_marker)
    given = engine.tokenizer.encode(text)[0]
    token_ids, placed = expand(codec, given, [codec.tokens_of(each) for each in shown])
    ends = engine.tokenizer.encode(tail, add_bos=False)[0]
    return Sequence(token_ids=token_ids + ends, score_from=len(token_ids), images=placed, top_logprobs=3)


def patches(video: Video) -> torch.Tensor:
    """Cut frames, which need no resizing, into patches of 2 x 4 x 4 pixels as Qwen documents them."""
    frames = [np.asarray(Image.open(io.BytesIO(frame)).convert("RGB"), dtype=np.float32) for frame in video.frames]
    frames += frames[-1:] * (len(frames) % 2)
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    pixels = torch.tensor((np.stack(frames) / 255 - mean) / std, dtype=torch.float32).permute(0, 3, 1, 2)
    times, rows, columns = len(frames) // 2, 24 // 8, 32 // 8
    cut = pixels.reshape(times, 2, 3, rows, 2, 4, columns, 2, 4).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return cut.reshape(times * rows * columns * 4, 3 * 2 * 4 * 4)


def positions(token_ids: list[int], ids: tuple[int, int], grids: list[tuple[list[int], int, int]]) -> torch.Tensor:
    """Return M-RoPE's positions as Qwen published them: a text goes on after the last position of any axis."""
    found, at, index, left = [], 0, 0, list(grids)
    while index < len(token_ids):
        if token_ids[index] not in ids:
            found.append([at] * 3)
            at, index = at + 1, index + 1
            continue
        times, rows, columns = left.pop(0)
        placed = [[time, row, column] for time in times for row in range(rows) for column in range(columns)]
        found += [[at + each for each in place] for place in placed]
        at, index = at + 1 + max(map(max, placed)), index + len(placed)
    return torch.tensor(found).T[:, None]


def logprobs(oracle: VisionOracle, family: str, token_ids: list[int], shown: list[Shown], own: bool) -> np.ndarray:
    """Return transformers' logprobs, with its `own` positions or with those that Qwen published."""
    assert isinstance(oracle, QwenOracle)
    config = oracle._model.config
    ids = config.image_token_id, config.video_token_id
    videos = [each for each in shown if isinstance(each, Video)]
    images = [each for each in shown if isinstance(each, bytes)]
    kinds = [[1 if token_id == ids[0] else 2 if token_id == ids[1] else 0 for token_id in token_ids]]
    grids = [[-(-len(video.frames) // 2), 6, 8] for video in videos]
    seconds = [2 / video.fps for video in videos]
    inputs: dict[str, Any] = {
        "input_ids": torch.tensor([token_ids]),
        "mm_token_type_ids": torch.tensor(kinds),
        "pixel_values_videos": torch.cat([patches(video) for video in videos]),
        "video_grid_thw": torch.tensor(grids),
        **(oracle.processed(images) if images else {}),
    }
    if family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor(seconds)
    if not own:
        step = config.vision_config.tokens_per_second if family == "qwen2_5_vl" else None
        steps = [step * each if step else 1 for each in seconds]
        times = [[int(time * step) for time in range(grid[0])] for grid, step in zip(grids, steps, strict=True)]
        spans = iter([(each, 3, 4) for each in times])
        listed: list[Any] = [next(spans) if isinstance(each, Video) else ([0], 4, 3) for each in shown]
        inputs["position_ids"] = positions(token_ids, ids, listed)
    with torch.no_grad():
        logits = oracle._model(**inputs, use_cache=False).logits[0].double()
    return torch.log_softmax(logits, dim=-1).numpy()


def check(sequence: Sequence, expected: np.ndarray) -> None:
    places = range(sequence.first_reported, len(sequence.token_ids))
    assert len(places) == len(sequence.columns.logprobs) > 0
    for place, found in zip(places, sequence.columns.logprobs, strict=True):
        assert abs(found - expected[place - 1, sequence.token_ids[place]]) <= TOLERANCE
    if sequence.sampling:
        first = sequence.num_input_tokens
        assert sequence.token_ids[first:] == expected[first - 1 : -1].argmax(axis=-1).tolist()


CASES: list[tuple[list[Shown], str]] = [
    ([SHORT], "look: [VIDEO] the fox"),
    ([SHORT, PICTURE], "[VIDEO] and [IMG] the fox"),
    ([PICTURE, LONG], "[IMG][VIDEO] the fox"),
    ([LONG, SHORT], "a [VIDEO] b [VIDEO]"),
    ([Video(FRAMES[:3], 4.0)], "[VIDEO]"),
]


def test_scores_after_videos_are_those_of_transformers(engine: Engine, oracle: tuple[Path, VisionOracle], family: str):
    """Together and alone: beside an image in either order, two of them, of an odd number of frames."""
    rows = [scored(engine, shown, text) for shown, text in CASES]
    engine.add(rows).result()
    alone = scored(engine, *CASES[3])
    engine.add([alone]).result()
    for row, (shown, _) in zip([*rows, alone], [*CASES, CASES[3]], strict=True):
        check(row, logprobs(oracle[1], family, row.token_ids, shown, own=False))
    check(rows[0], logprobs(oracle[1], family, rows[0].token_ids, [SHORT], own=True))
    assert [image.num_frames for image in rows[2].images] == [0, 5]


def test_generations_after_videos_are_those_of_transformers(
    engine: Engine, oracle: tuple[Path, VisionOracle], family: str
):
    """The tokens that follow one another are placed after the video's time, too."""
    rows = []
    for shown, text in CASES[2:4]:
        row = scored(engine, shown, text, "")
        row.score_from, row.sampling = None, Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
        rows.append(row)
    engine.add(rows).result()
    for row, (shown, _) in zip(rows, CASES[2:4], strict=True):
        check(row, logprobs(oracle[1], family, row.token_ids, shown, own=False))


def test_a_video_in_chunks_and_from_the_cache_has_the_same_numbers(oracle: tuple[Path, VisionOracle], family: str):
    engine = Engine(EngineSettings(model=str(oracle[0]), max_batch_tokens=16))
    try:
        for _ in range(2):
            rows = [scored(engine, *CASES[2]), scored(engine, *CASES[3])]
            engine.add(rows).result()
            for row, (shown, _) in zip(rows, CASES[2:4], strict=True):
                check(row, logprobs(oracle[1], family, row.token_ids, shown, own=False))
    finally:
        engine.close()


def test_videos_that_cannot_be_shown_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InvalidRequest, match="have several sizes"):
        scored(engine, [Video((FRAMES[0], PICTURE), 2.0)], "[VIDEO]")
    with pytest.raises(InvalidRequest, match="an image cannot be decoded"):
        scored(engine, [Video((FRAMES[0], FRAMES[1][:50]), 2.0)], "[VIDEO]")
    with pytest.raises(ValueError, match="in another order"):
        scored(engine, [PICTURE], "[VIDEO]")
    monkeypatch.setattr("scorepool.engine.vision.qwen_videos.MAX_PIXELS", 4 * 24 * 32)
    with pytest.raises(InvalidRequest, match="a video of 5 frames has 3840 pixels as the model sees it"):
        scored(engine, [Video(FRAMES, 3.0)], "[VIDEO]")


def test_times_beyond_the_context_are_refused_and_those_up_to_it_computed(
    engine: Engine, oracle: tuple[Path, VisionOracle], family: str
):
    context = engine.model_info.context_length
    slow = Video(FRAMES, 4 * 2 / (context - 40))  # one patch in the second half of the context, and one after its end
    if family == "qwen2_vl":  # its times count patches
        engine.add([scored(engine, [slow], "a [VIDEO] b")]).result()
        return
    with pytest.raises(ContextLengthExceeded, match=f"this model's context is {context}: a higher `fps`"):
        engine.add([scored(engine, [slow], "a [VIDEO] b")])
    far = Video(FRAMES[:4], slow.fps)
    row = scored(engine, [far], "a [VIDEO] b", " the fox")
    engine.add([row]).result()
    assert max(row.images[0].times) > context // 2
    check(row, logprobs(oracle[1], family, row.token_ids, [far], own=False))


def test_other_families_take_no_videos(tmp_path: Path):
    build_mistral3(tmp_path)
    engine = Engine(EngineSettings(model=str(tmp_path)))
    try:
        assert engine.chat.images is not None
        assert engine.chat.images.video_marker is None
        with pytest.raises(InvalidRequest, match="models of the family mistral3 take no videos"):
            engine.chat.images.tokens_of(SHORT)
    finally:
        engine.close()
