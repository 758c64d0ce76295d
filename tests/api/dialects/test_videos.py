"""Videos as frames through every process: OpenAI's SDK and native jobs, on a tiny Qwen2.5-VL."""

import base64
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from scorepool import Client, Image, JobFailed, wire
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from scorepool.verify import CannotTell, on_server, verify
from tests.images import image_bytes

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")
pytest.importorskip("av", reason="the extra `vision` is not installed")
from tests.tiny_vision import build_qwen2_5_vl
from tests.videos import video_bytes

FRAMES = [image_bytes(32, 24, shade=shade, kind="JPEG") for shade in (0, 40, 90)]


def url_of(*frames: bytes) -> str:
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)


URL = url_of(*FRAMES)
NUM_TOKENS = 2 * 3 * 4  # two patches of two frames, with a feature for 8 x 8 pixels


@pytest.fixture(scope="module")
def watching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder, state = tmp_path_factory.mktemp("qwen2_5_vl"), tmp_path_factory.mktemp("stack")
    build_qwen2_5_vl(folder)
    with Stack([f"see={folder}"], state=state, environ={"SCOREPOOL_PORT": str(free_port())}, logs=state) as stack:
        yield stack


def ask(sdk: OpenAI, *parts: Any, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "look "}, *parts]}]
    return sdk.chat.completions.create(model="see", messages=messages, max_tokens=4, temperature=0, **options)


def test_openais_sdk_shows_a_video_and_learns_how_many_frames_were_shown(watching: Stack):
    with OpenAI(base_url=f"{watching.url}/v1", api_key="unused", max_retries=0) as sdk:
        without = ask(sdk)
        answer = ask(sdk, {"type": "video_url", "video_url": {"url": URL}}, logprobs=True)
        slower = ask(sdk, {"type": "video_url", "video_url": {"url": URL, "fps": 0.1}}, logprobs=True)
        with pytest.raises(openai.BadRequestError, match="cannot be decoded"):
            ask(sdk, {"type": "video_url", "video_url": {"url": url_of(*FRAMES[:2], FRAMES[2][:-30])}})
    assert answer.usage.prompt_tokens == without.usage.prompt_tokens + NUM_TOKENS + 2
    assert answer.usage.prompt_tokens_details.video_frames == 3
    assert without.usage.prompt_tokens_details is None
    first, other = (each.choices[0].logprobs.content[0].logprob for each in (answer, slower))
    assert first != other  # positions follow its time


def test_frames_of_files_are_sampled_and_counted(watching: Stack):
    data = video_bytes([0, 60, 120, 180], rate=2, width=32, height=24)
    hours = video_bytes([0, 9], times=[0, 36_000], width=32, height=24)
    url, long_url = (f"data:video/mp4;base64,{base64.b64encode(each).decode()}" for each in (data, hours))
    with OpenAI(base_url=f"{watching.url}/v1", api_key="unused", max_retries=0) as sdk, Client(watching.url) as client:
        answers = [ask(sdk, {"type": "video_url", "video_url": {"url": url, "fps": fps}}) for fps in (1, 2, 0.1)]
        native = client.generate("see", "It is", images=[Image(data=data)], max_tokens=1)
        with pytest.raises(openai.BadRequestError, match=r"lasts 3600\d.* s; expected at most 3600"):
            ask(sdk, {"type": "video_url", "video_url": {"url": long_url}})
    assert [answer.usage.prompt_tokens_details.video_frames for answer in answers] == [2, 4, 1]
    assert native.usage.video_frames == 4


def test_native_jobs_show_videos(watching: Stack):
    video = Image(frames=FRAMES, fps=2.0, at=4)
    with Client(watching.url) as client:
        scores = client.score("see", [" a fox", " a dog"], prompt="It is", images=[video])
        text = client.generate("see", "It is", images=[video], max_tokens=3, recompute=True, temperature=0)
        with pytest.raises(JobFailed, match="several sizes"):
            client.score("see", ["a"], prompt="b", images=[Image(frames=[FRAMES[0], image_bytes(64, 16)])])
    assert (scores.usage.video_frames, text.usage.video_frames) == (6, 3)
    assert (scores.usage.images, text.usage.images) == (2, 1)
    [sequence] = text.sequences
    assert sequence.recomputed_logprobs == pytest.approx(sequence.logprobs, abs=1e-4)


def test_a_result_after_images_names_what_shows_them_and_is_neither_verified_nor_called_different(watching: Stack):
    request = wire.Generate(model="see", prompt="It is", images=[Image(data=FRAMES[0])], max_tokens=3)
    with Client(watching.url) as client:
        [model] = client.models()
        submitted = client.submit(request)
        stamp = submitted.result(60).stamp
        with pytest.raises(CannotTell, match="its prompts show images"):
            verify(client.job(submitted.id), on_server(client, 60))
    assert stamp.versions == model.stamp.versions
    assert stamp.versions.keys() >= {"mlx", "mlx-vlm", "pillow", "transformers"}
    assert stamp.verification is not None
    assert stamp.verification.reason == "certificates compare texts, and the job shows images"
