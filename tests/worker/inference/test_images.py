"""Images of messages: a chat template that shows none where they stand is refused by name."""

from pathlib import Path

import pytest

from scorepool import wire
from scorepool.engine import ChatCodec, Engine, EngineSettings, InvalidRequest, Tokenizer
from scorepool.engine.images import ImageTokens, Injection, Video
from scorepool.worker.inference.images import num_characters_of_images
from scorepool.worker.inference.result import to_result
from scorepool.worker.inference.tokenizing import MAX_WAITING_CHARACTERS
from scorepool.worker.inference.translate import to_sequences
from scorepool.worker.rq.errors import JobError
from tests.api.fake_worker import PROVENANCE
from tests.images import image_bytes, png_header
from tests.tiny_tokenizer import EOS, build_tokenizer
from tests.worker.fake import finish

MARKER = "[IMG]"
LOOP = "{% for message in messages %}BODY{% endfor %}"


class OneToken:
    """Each image is one token."""

    family = "tiny"
    video_marker = video_marker_id = None
    marker, spelled_marker = MARKER, f"{MARKER}\n"  # a line's end follows each image
    injection = Injection()

    def __init__(self, marker_id: int) -> None:
        self.marker_id = marker_id

    def tokens_of(self, data: bytes) -> ImageTokens:
        return ImageTokens("digest", data, [self.marker_id], (1, 1))


def translate(body: str, role: str) -> str:
    fast = build_tokenizer()
    fast.add_special_tokens({"additional_special_tokens": [MARKER]})
    fast.chat_template = LOOP.replace("BODY", body)
    codec = ChatCodec(Tokenizer(fast, [EOS]))
    codec.images = OneToken(fast.convert_tokens_to_ids(MARKER))
    message = wire.Message(role=role, content="a", images=[wire.Image(data=image_bytes())])  # type: ignore[arg-type]
    [prepared] = finish(to_sequences(wire.Generate(model="m", messages=[message], max_tokens=1), codec, 100))
    assert len(prepared.sequence.images) == 1
    return str(fast.decode(prepared.sequence.token_ids))


def test_workers_fetch_nothing():
    request = wire.Generate(model="m", prompt="a", images=[wire.Image(url="https://example.com/a.png")])
    with pytest.raises(JobError, match="workers fetch nothing"):
        finish(to_sequences(request, ChatCodec(Tokenizer(build_tokenizer(), [EOS])), 100))


PARTS = "{% for part in message.content %}{{ MARKER if part.type == 'image' else part.text }}{% endfor %}"


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_template_that_shows_images_gets_their_parts(role: str):
    assert translate(PARTS.replace("MARKER", repr(MARKER)), role) == f"{MARKER}\na"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("{{ message.content | string }}", "the chat template shows no images"),
        ("{% if message.role == 'user' %}{{ message.content }}{% endif %}", "the chat template shows no images"),
        ("{{ '' + message.content }}", "the model's chat template"),
        ("{{ raise_exception('a tool says texts') }}", "a tool says texts"),
    ],
)
def test_a_template_that_shows_none_is_refused_by_name(body: str, says: str):
    with pytest.raises((JobError, InvalidRequest), match=says):
        translate(body, "tool")


def test_chats_and_prompts_have_the_tokens_of_gemma_3s_processor(tmp_path: Path):
    """The lines' ends that stand around its images are encoded together with the text."""
    pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")
    from tests.tiny_vision import build_gemma3

    oracle = build_gemma3(tmp_path)
    engine = Engine(EngineSettings(model=str(tmp_path)))
    try:
        data, chat = image_bytes(20, 30), engine.chat
        message = wire.Message(role="user", content="a\nb", images=[wire.Image(data=data, at=2)])
        prompt = wire.Generate(model="m", prompt="the\n fox", images=[wire.Image(data=data, at=4)], max_tokens=1)
        [told] = finish(to_sequences(wire.Generate(model="m", messages=[message], max_tokens=1), chat, 400))
        [shown] = finish(to_sequences(prompt, chat, 400))
    finally:
        engine.close()
    marker = oracle.marker
    text = f"<bos><|user|>\na\n{marker}b<|assistant|>\n"
    assert told.sequence.token_ids == oracle.token_ids(text, [data])
    assert shown.sequence.token_ids[1:] == oracle.token_ids(f"the\n{marker} fox", [data])


def test_a_model_of_images_is_shown_the_frames_of_a_video(tmp_path: Path):
    """In chats, prompts and items of scores, with the tokens that transformers' processor makes of as many images."""
    pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")
    from tests.tiny_vision import build_gemma3

    oracle = build_gemma3(tmp_path)
    engine = Engine(EngineSettings(model=str(tmp_path)))
    frames = [image_bytes(20, 30, shade=shade) for shade in (10, 90, 170)]
    video, photo = wire.Image(frames=frames, at=4), wire.Image(data=image_bytes(shade=40))
    message = wire.Message(role="user", content="the fox", images=[photo, video])
    items = [wire.ScoreItem(completion=text) for text in (" runs", " sleeps")]
    try:
        requests = [
            wire.Generate(model="m", prompt="the fox", images=[photo, video], max_tokens=1),
            wire.Generate(model="m", messages=[message], max_tokens=1),
            wire.Score(model="m", prompt="the fox", images=[photo, video], items=items),
        ]
        [prompt], [chat], scores = (finish(to_sequences(request, engine.chat, 800)) for request in requests)
    finally:
        engine.close()
    shown = [photo.data, *frames]
    text = f"{oracle.marker}the {oracle.marker * 3}fox"
    assert prompt.sequence.token_ids[1:] == oracle.token_ids(text, shown)
    assert chat.sequence.token_ids == oracle.token_ids(f"<bos><|user|>\n{text}<|assistant|>\n", shown)
    for each in [prompt, chat, *scores]:
        assert [image.data for image in each.sequence.images] == shown
        assert [image.num_frames for image in each.sequence.images] == [0, 1, 1, 1]


def test_a_frame_that_no_image_may_be_is_refused_by_name():
    class TwoPixels(OneToken):
        def frames_of(self, video: object) -> list[bytes]:
            return [image_bytes(2, 2)]

    codec = ChatCodec(Tokenizer(build_tokenizer(), [EOS]))
    codec.images = TwoPixels(7)
    request = wire.Generate(model="m", prompt="a", images=[wire.Image(frames=[image_bytes()])])
    with pytest.raises(JobError, match=r"images\[0\]: a frame of the video: expected an image of at least 4 x 4"):
        finish(to_sequences(request, codec, 100))


class Counting(OneToken):
    """Notes what it is asked for. Images of one shade are refused."""

    def __init__(self, marker_id: int, refused: bytes = b"") -> None:
        super().__init__(marker_id)
        self.refused, self.asked = refused, []

    def tokens_of(self, data: bytes) -> ImageTokens:
        self.asked.append(data)
        if data == self.refused:
            raise InvalidRequest("an image cannot be decoded")
        return super().tokens_of(data)

    def frames_of(self, video: Video) -> tuple[bytes, ...]:
        self.asked.append(video)
        return video.frames


def counting_codec(refused: bytes = b"") -> tuple[ChatCodec, Counting]:
    fast = build_tokenizer()
    fast.add_special_tokens({"additional_special_tokens": [MARKER]})
    codec = ChatCodec(Tokenizer(fast, [EOS]))
    codec.images = counting = Counting(fast.convert_tokens_to_ids(MARKER), refused)
    return codec, counting


def test_items_that_share_images_have_each_decoded_and_digested_once():
    codec, counting = counting_codec()
    one, frames = image_bytes(), [image_bytes(shade=shade) for shade in (1, 2)]
    videos = [wire.Image(frames=[frame]) for frame in frames]
    items = [wire.ScoreItem(completion=f" {number}") for number in range(50)]
    request = wire.Score(model="m", prompt="a", images=[wire.Image(data=one), *videos], items=items)
    prepared = finish(to_sequences(request, codec, 400))
    assert counting.asked == [Video((frames[0],), 2.0), Video((frames[1],), 2.0), one, *frames]
    assert [len(each.sequence.images) for each in prepared] == [3] * 50


def test_a_tokenize_job_counts_images_and_frames_too():
    codec, counting = counting_codec()
    codec.tokenizer.hf_tokenizer.chat_template = LOOP.replace("BODY", PARTS.replace("MARKER", repr(MARKER)))
    codec = ChatCodec(codec.tokenizer)
    codec.images = counting
    shown = [wire.Image(data=image_bytes()), wire.Image(frames=[image_bytes(shade=1), image_bytes(shade=2)])]
    request = wire.Tokenize(model="m", messages=[wire.Message(role="user", content="a", images=shown)])
    result = to_result(request, finish(to_sequences(request, codec, 400)), codec, PROVENANCE)
    assert (result.usage.images, result.usage.video_frames) == (3, 2)


def test_an_image_that_cannot_be_decoded_is_tried_once_for_all_items_that_show_it():
    bad = image_bytes(shade=3)
    codec, counting = counting_codec(bad)
    items = [wire.ScoreItem(completion=" b")] * 20
    request = wire.Score(model="m", prompt="a", images=[wire.Image(data=bad)], items=items, on_item_error="report")
    prepared = finish(to_sequences(request, codec, 400))
    assert counting.asked == [bad]
    assert {each.failure.message for each in prepared} == {"images[0]: an image cannot be decoded"}


@pytest.mark.parametrize(
    ("prompt", "at", "expected"),
    [("a", 1, " b"), ("a ", 2, " b"), ("a \n", 1, " \n b"), ("a \n", 2, "\n b"), (" \n", 0, " \n b")],
)
def test_whitespace_around_an_image_is_the_prompts_and_later_whitespace_the_completions(
    prompt: str, at: int, expected: str
):
    """Gemma 3 shows an image with two line ends after it, which no completion should be scored with."""
    codec, _ = counting_codec()
    request = wire.Score(
        model="m",
        prompt=prompt,
        images=[wire.Image(data=image_bytes(), at=at)],
        items=[wire.ScoreItem(completion=" b")],
    )
    [prepared] = finish(to_sequences(request, codec, 400))
    row = prepared.sequence
    assert codec.tokenizer.hf_tokenizer.decode(row.token_ids[row.score_from :]) == expected
    assert codec.tokenizer.hf_tokenizer.decode(row.token_ids[: row.score_from]).endswith(f"{MARKER}\n")


def test_images_that_wait_to_be_decoded_count_like_long_texts():
    """An owner of which much waits is claimed no more jobs for now, and those of others are claimed as fast as ever."""
    large, small = wire.Image(data=png_header(4000, 4000)), wire.Image(data=png_header(64, 64))
    film = wire.Image(data=b"\0\0\0\x18ftypmp42")
    for images, expected in (([], 0), ([small], 256), ([large, small], 10**6 + 256), ([film], 2**20)):
        assert num_characters_of_images(wire.Generate(model="m", prompt="a", images=images)) == expected
    frames = wire.Image(frames=[small.data] * 3)
    assert num_characters_of_images(wire.Generate(model="m", prompt="a", images=[frames])) == 3 * 256
    item = wire.ScoreItem(prompt="a", completion="b", images=[large])
    assert num_characters_of_images(wire.Score(model="m", items=[item] * 2)) > MAX_WAITING_CHARACTERS
