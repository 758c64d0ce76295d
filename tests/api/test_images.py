"""Images are checked before a job is queued: what they are, their bytes, their pixels, their number, the model."""

import base64
import json
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from scorepool import wire
from scorepool.api.dialects import images
from scorepool.api.dialects.anthropic.messages import MessagesRequest
from scorepool.api.dialects.anthropic.messages import to_request as of_messages
from scorepool.api.dialects.openai.chat import ChatRequest, to_request
from scorepool.api.dialects.openai.responses import ResponseRequest
from scorepool.api.dialects.openai.responses import to_request as of_responses
from tests.api.conftest import Serving, generate, score
from tests.api.fake_worker import FakeWorker
from tests.images import data_url, image_bytes, image_part, png_header

pytestmark = pytest.mark.anyio
IMAGE = base64.b64encode(image_bytes()).decode()
HELLO = base64.b64encode(b"hello").decode()


@pytest.fixture
def vision(redis: Redis) -> FakeWorker:
    """A live worker whose model takes images."""
    worker = FakeWorker(redis, model="see", name="w2")
    worker.register(images="mistral3", context_length=1000)
    return worker


def chat(*parts: Any, role: str = "user", **changes: Any) -> dict[str, Any]:
    return {"model": "see", "messages": [{"role": role, "content": [*parts]}], "max_tokens": 4} | changes


def by_url(url: str) -> dict[str, Any]:
    return chat({"type": "image_url", "image_url": {"url": url}})


async def test_images_of_all_kinds_of_jobs_reach_the_worker(serving: Serving, vision: FakeWorker):
    one = {"data": IMAGE}
    jobs = [
        generate(model="see", prompt="Look: ", images=[one | {"at": 6}]),
        {"type": "generate", "model": "see", "messages": [{"role": "user", "content": "Look", "images": [one]}]},
        score(model="see", prompt="Look", images=[one], items=[{"completion": "a"}]),
        score(model="see", items=[{"prompt": "Look", "images": [one], "completion": "a"}]),
        {"type": "tokenize", "model": "see", "messages": [{"role": "user", "content": "Look", "images": [one]}]},
    ]
    async with serving() as http:
        for job in jobs:
            reply = await http.post("/v1/jobs", json=job)
            assert reply.status_code == 202, reply.text
            [(_, image)] = wire.images_of(vision.start(reply.json()["id"]))
            assert image.data == image_bytes()


def test_parts_of_a_chat_keep_their_order():
    first, second = image_bytes(), image_bytes(shade=9, kind="JPEG")
    parts = [
        {"type": "text", "text": "One: "},
        image_part(first),
        {"type": "text", "text": " two: "},
        {"type": "image_url", "image_url": {"url": data_url(second, "jpeg"), "detail": "low"}},
        {"type": "text", "text": "?"},
    ]
    job = to_request(wire.parse(json.dumps(chat(*parts)).encode(), ChatRequest), 60)
    [message] = job.messages or ()
    assert (message.content, [image.at for image in message.images]) == ("One:  two: ?", [5, 11])
    assert [image.data for image in message.images] == [first, second]
    assert wire.decode_request(wire.encode(job)) == job


def responses(*parts: Any, **changes: Any) -> dict[str, Any]:
    return {"model": "see", "input": [{"role": "user", "content": [*parts]} | changes]}


def anthropic(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"model": "see", "messages": [{"role": role, "content": [*blocks]}], "max_tokens": 4}


def input_image(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def image_block(data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_the_dialects_make_one_job_of_the_same_images():
    """Also of those that a tool returned."""
    url, text = data_url(image_bytes()), "Look"
    call = {"name": "look", "arguments": "{}"}
    chat_body = {
        "model": "see",
        "max_tokens": 4,
        "temperature": 1,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": text}, image_part(image_bytes())]},
            {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": call}]},
            {
                "role": "tool",
                "tool_call_id": "a",
                "content": [image_part(image_bytes()), {"type": "text", "text": "b"}],
            },
        ],
    }
    said = {"type": "input_text", "text": "b"}
    responses_body = {
        "model": "see",
        "max_output_tokens": 4,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": text}, input_image(url)]},
            {"type": "function_call", "call_id": "a", **call},
            {"type": "function_call_output", "call_id": "a", "output": [input_image(url), said]},
        ],
    }  # fmt: skip
    block = image_block(IMAGE)
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block, {"type": "text", "text": "b"}]}
    messages_body = {
        "model": "see",
        "max_tokens": 4,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": text}, block]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
            {"role": "user", "content": [result]},
        ],
    }
    job = to_request(wire.parse(json.dumps(chat_body).encode(), ChatRequest), 60)
    assert [[image.at for image in message.images] for message in job.messages or ()] == [[4], [], [0]]
    assert of_responses(wire.parse(json.dumps(responses_body).encode(), ResponseRequest), 60) == job
    assert of_messages(wire.parse(json.dumps(messages_body).encode(), MessagesRequest), 60) == job


def test_base64_is_decoded_once(monkeypatch: pytest.MonkeyPatch):
    decoded: list[str] = []
    monkeypatch.setattr(
        images, "binascii", SimpleNamespace(a2b_base64=lambda text, **_: decoded.append(text) or image_bytes())
    )
    bodies: list[tuple[dict[str, Any], Any, Any]] = [
        (chat(image_part(image_bytes())), ChatRequest, to_request),
        (responses(input_image(data_url(image_bytes()))), ResponseRequest, of_responses),
        (anthropic(image_block(IMAGE)), MessagesRequest, of_messages),
    ]  # fmt: skip
    for body, body_type, build in bodies:
        build(wire.parse(json.dumps(body).encode(), body_type), 60)
    assert len(decoded) == len(bodies)


def video_part(url: str, **options: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url} | options}


def test_a_video_of_a_chat_is_its_frames_in_their_place():
    frames = [image_bytes(), image_bytes(shade=9)]
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)
    parts = [{"type": "text", "text": "Look: "}, video_part(url, fps=4), image_part(frames[0])]
    job = to_request(wire.parse(json.dumps(chat(*parts)).encode(), ChatRequest), 60)
    [message] = job.messages or ()
    assert message.images == [wire.Image(frames=frames, fps=4.0, at=6), wire.Image(data=frames[0], at=6)]
    assert wire.decode_request(wire.encode(job)) == job


MP4 = base64.b64encode(b"\0\0\0\x18ftypmp42" + bytes(50)).decode()
VAST = base64.b64encode(png_header(8000, 8000)).decode()
VIDEO = "messages[0].content[0].video_url"
CHAT, JOBS, PART = "/v1/chat/completions", "/v1/jobs", "messages[0].content[0].image_url"
RESPONSES, MESSAGES, BLOCK = "/v1/responses", "/v1/messages", "messages[0].content[0]"
INPUT = "input[0].content[0]"
BY_FILE = {"type": "image", "source": {"type": "file", "file_id": "a"}}
BAD: list[tuple[str, dict[str, Any], int, str, str]] = [
    (CHAT, by_url(data_url(b"hello")), 400, PART, "expected a PNG"),
    (CHAT, by_url("data:image/png;base64,@@@"), 400, PART, "base64"),
    (CHAT, by_url("data:image/png,abc"), 400, PART, "a data URL"),
    (CHAT, by_url("data:text/html;base64,aGk="), 400, PART, "data URL"),
    (CHAT, by_url("http://169.254.169.254/a"), 400, "messages[0].content", "SCOREPOOL_FETCH_IMAGES"),
    (JOBS, generate(model="see", images=[{"at": 0}]), 400, "images[0]", "found none"),
    (JOBS, generate(model="see", images=[{"data": IMAGE, "url": "https://a.example"}]), 400, "images[0]", "`data` and"),
    (JOBS, generate(model="see", images=[{"frames": []}]), 400, "images[0]", "found none"),
    (JOBS, generate(model="see", images=[{"frames": [IMAGE, HELLO]}]), 400, "images[0].frames[1]", "expected a PNG"),
    (JOBS, generate(model="see", images=[{"frames": [VAST] * 5}]), 400, "images[0]", "268435456 pixels together"),
    (JOBS, generate(model="see", images=[{"data": IMAGE, "fps": 1}]), 400, "images[0].fps", "`fps` needs `frames`"),
    (JOBS, generate(model="see", images=[{"frames": [IMAGE], "fps": 0}]), 400, "images[0].fps", "0"),
    (JOBS, generate(model="see", images=[{"frames": [IMAGE], "fps": 1e-5}]), 400, "images[0].fps", ">= 0.001"),
    (CHAT, chat(video_part(f"data:video/jpeg;base64,{IMAGE}", fps=1e-5)), 400, f"{VIDEO}.fps", ">= 0.001"),
    (JOBS, generate(model="see", images=[{"frames": [IMAGE] * 129}]), 413, "images[0]", "SCOREPOOL_MAX_VIDEO_FRAMES"),
    (JOBS, generate(model="see", images=[{"frames": [IMAGE] * 769}]), 400, "images[0].frames", "768"),
    (CHAT, chat(video_part(f"data:video/jpeg;base64,{IMAGE},@")), 400, VIDEO, "base64 after each comma"),
    (CHAT, chat(video_part(f"data:video/jpeg;base64,{IMAGE},{HELLO}")), 400, VIDEO, "`frames[1]`: expected a PNG"),
    (CHAT, chat(video_part("data:video/jpeg;base64," + ",".join([IMAGE] * 769))), 400, VIDEO, "at most 768 frames"),
    (CHAT, chat(video_part(f"data:video/mp4;base64,{IMAGE}")), 400, VIDEO, "expected an MP4 or WebM file, found bytes"),
    (CHAT, by_url(f"data:image/png;base64,{MP4}"), 400, PART, "expected an image, found a video"),
    (CHAT, chat(video_part(f"data:video/mp4;base64,{MP4}"), model="demo"), 400, "messages[0].content", "no images"),
    (CHAT, chat(video_part("https://example.com/a.mp4")), 400, VIDEO, "a video, as data:video/jpeg"),
    (CHAT, chat(video_part(f"data:video/jpeg;base64,{IMAGE}"), role="system"), 400, "messages[0].content", "an image"),
    (CHAT, by_url("file:///etc/passwd"), 400, PART, "a data URL"),
    (CHAT, by_url(data_url(png_header(1, 1))), 400, PART, "1 x 1"),
    (CHAT, by_url(data_url(png_header(50_000, 50_000))), 400, PART, "50"),
    (CHAT, by_url(data_url(png_header(6_000, 6_000))), 400, "messages[0].content", "IMAGE_PIXELS"),
    (CHAT, chat(image_part(image_bytes()), role="system"), 400, "messages[0].content", "those of the user and tools"),
    (CHAT, chat(image_part(image_bytes()), model="demo"), 400, "messages[0].content", "takes no images"),
    (RESPONSES, responses(input_image(data_url(b"hello"))), 400, f"{INPUT}.image_url", "expected a PNG"),
    (RESPONSES, responses(input_image(data_url(png_header(50_000, 50_000)))), 400, f"{INPUT}.image_url", "50"),
    (RESPONSES, responses({"type": "input_image", "file_id": "file-1"}), 400, f"{INPUT}.file_id", "null"),
    (RESPONSES, responses({"type": "input_image"}), 400, INPUT, "needs `image_url`"),
    (RESPONSES, responses(input_image(data_url(image_bytes())), role="system"), 400, "input[0].content", "the user"),
    (RESPONSES, responses(*[input_image(data_url(image_bytes()))] * 17), 413, "input", "SCOREPOOL_MAX_IMAGES"),
    (RESPONSES, responses(input_image(data_url(image_bytes()))) | {"model": "demo"}, 400, "input", "takes no images"),
    (MESSAGES, anthropic(image_block(HELLO)), 400, BLOCK, "expected a PNG"),
    (MESSAGES, anthropic(image_block("@@")), 400, BLOCK, "expected base64 in `data`"),
    (MESSAGES, anthropic(image_block(IMAGE), role="assistant"), 400, f"{BLOCK}.type", "turn of the assistant"),
    (MESSAGES, anthropic(BY_FILE), 400, f"{BLOCK}.source.type", "file"),
    (MESSAGES, anthropic({"type": "document", "source": {}}), 400, f"{BLOCK}.type", "document"),
    (MESSAGES, anthropic(*[image_block(IMAGE)] * 17), 413, "messages", "SCOREPOOL_MAX_IMAGES"),
    ("/v1/messages/count_tokens", {"model": "demo", "messages": anthropic(image_block(IMAGE))["messages"]}, 400,
     "messages", "takes no images"),
    (CHAT, chat(*[image_part(image_bytes())] * 17), 413, "messages[0].content", "SCOREPOOL_MAX_IMAGES"),
    (CHAT, chat(*[image_part(image_bytes())] * 65), 400, "messages", "has 65 images; expected at most 64"),
    (CHAT, chat(image_part(image_bytes()), prompt_logprobs=0), 400, "prompt_logprobs", "does not go with `images`"),
    (CHAT, chat(image_part(image_bytes()), truncate_prompt_tokens=9), 400, "truncate_prompt_tokens", "does not go"),
    (CHAT, chat(image_part(image_bytes()), speculation="ngram"), 400, "speculation", "ngram does not go with"),
    (CHAT, chat(image_part(image_bytes()), specprefill=True), 400, "specprefill", "does not go with `images`"),
    (RESPONSES, responses(*[input_image(data_url(image_bytes()))] * 65), 400, "input", "has 65 images"),
    (MESSAGES, anthropic(*[image_block(IMAGE)] * 65), 400, "messages", "has 65 images"),
    ("/v1/messages/count_tokens", {"model": "demo", "messages": anthropic(*[image_block(IMAGE)] * 65)["messages"]}, 400,
     "messages", "has 65 images"),
    (CHAT, chat({"type": "input_audio"}), 400, "messages[0].content[0].type", "input_audio"),
    (JOBS, generate(model="see", images=[{"data": HELLO}]), 400, "images[0]", "expected a PNG"),
    (JOBS, generate(model="see", images=[{"data": IMAGE, "at": 2}]), 400, "images[0].at", "`images[0].at` is 2"),
    (JOBS, generate(model="see", prompt=[1], images=[{"data": IMAGE}]), 400, "images", "needs a `prompt` of text"),
    (JOBS, generate(model="see", prompt_logprobs=True, images=[{"data": IMAGE}]), 400, "prompt_logprobs", "go"),
    (JOBS, generate(model="see", adapter="x", images=[{"data": IMAGE}]), 400, "adapter", "`adapter`"),
    (JOBS, generate(model="see", speculation="ngram", images=[{"data": IMAGE}]), 400, "speculation", "go"),
    (JOBS, generate(model="see", speculation_tokens=2, images=[{"data": IMAGE}]), 400, "speculation_tokens", "go"),
    (JOBS, generate(model="see", include_draft_logprobs=True, images=[{"data": IMAGE}]), 400,
     "include_draft_logprobs", "go"),
    (JOBS, generate(images=[{"data": IMAGE}]), 400, "images[0]", "the model 'demo' takes no images"),
    (JOBS, score(images=[{"data": IMAGE}]), 400, "images", "needs a `prompt` of text"),
    (JOBS, score(model="see", score="all", prompt="a", items=[{"completion": "b"}], images=[{"data": IMAGE}]),
     400, "score", "`score` all"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "field", "says"), BAD)
async def test_what_cannot_be_shown_is_refused_by_name(
    serving: Serving, worker: FakeWorker, vision: FakeWorker, path: str, body: Any, status: int, field: str, says: str
):
    async with serving() as http:
        reply = await http.post(path, json=body)
    error = reply.json()["error"]
    assert reply.status_code == status, error
    if path.startswith(MESSAGES):  # Anthropic's errors have the field in their message alone
        assert error["message"].startswith(f"{field}: "), error
    else:
        assert (error["field"] or "") == field, error
    assert says in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400
    assert worker.waiting() == vision.waiting() == set()


async def test_the_operator_sets_the_limits(serving: Serving, vision: FakeWorker):
    async with serving(max_images=1, max_image_bytes=100, max_image_pixels=800) as http:
        for body, says in (
            (chat(*[image_part(image_bytes(16, 16))] * 2), "SCOREPOOL_MAX_IMAGES"),
            (chat(image_part(image_bytes(25, 25))), "SCOREPOOL_MAX_IMAGE_BYTES"),
            (chat(image_part(png_header(29, 29))), "SCOREPOOL_MAX_IMAGE_PIXELS"),
        ):
            reply = await http.post("/v1/chat/completions", json=body)
            assert reply.status_code in (400, 413)
            assert says in reply.json()["error"]["message"]


def test_a_header_of_ten_gigapixels_takes_no_memory():
    tracemalloc.start()
    try:
        with pytest.raises(wire.Invalid, match="found 100000 x 100000"):
            wire.parse(
                b'{"type":"generate","model":"m","prompt":"a","images":[{"data":"%s"}]}'
                % base64.b64encode(png_header(100_000, 100_000)),
                wire.Generate,
            )
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
