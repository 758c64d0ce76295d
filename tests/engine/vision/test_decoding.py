"""Files of images are decoded as viewers show them, within bounds, and hold up nobody who needs another one."""

import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from scorepool.engine import Engine, EngineSettings, InvalidRequest
from scorepool.engine.images import digest_of
from scorepool.wire import image_header
from tests.images import image_bytes

pytest.importorskip("mlx_vlm", reason="the extra `vision` is not installed")
from scorepool.engine.vision import codec
from scorepool.engine.vision.jpeg_scans import num_scans
from tests.tiny_vision import build_mistral3

GRAY = np.array([[0, 255, 256, 30_000, 65_535, 0]] * 5, np.uint16)
CLEAR, HALF, SOLID = (0, 0, 0, 0), (255, 0, 0, 128), (9, 8, 7, 255)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("mistral3")
    build_mistral3(folder)
    engine = Engine(EngineSettings(model=str(folder)))
    yield engine
    engine.close()


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def shown(data: bytes) -> list[tuple[int, ...]]:
    """Return the first pixels of an image as the model sees it."""
    return [tuple(pixel) for pixel in np.asarray(codec.decode(data))[0, :3].tolist()]


def transparent() -> Image.Image:
    image = Image.new("RGBA", (5, 5), CLEAR)
    image.putpixel((1, 0), HALF)
    image.putpixel((2, 0), SOLID)
    return image


def palette() -> Image.Image:
    image = Image.new("P", (5, 5))
    image.putpalette([10, 20, 30, 255, 0, 0, 0, 255, 0])
    image.putpixel((1, 0), 1)
    image.putpixel((2, 0), 2)
    return image


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (saved(transparent()), [(255, 255, 255), (255, 127, 127), (9, 8, 7)]),
        (saved(transparent(), "WEBP", lossless=True), [(255, 255, 255), (255, 127, 127), (9, 8, 7)]),
        (saved(transparent().convert("LA")), [(255, 255, 255), (165, 165, 165), (8, 8, 8)]),
        (saved(palette()), [(10, 20, 30), (255, 0, 0), (0, 255, 0)]),
        (saved(palette(), transparency=1), [(10, 20, 30), (255, 255, 255), (0, 255, 0)]),
        (saved(palette(), "GIF", transparency=1), [(10, 20, 30), (255, 255, 255), (0, 255, 0)]),
        (saved(Image.new("RGB", (5, 5), (1, 2, 3)), transparency=(1, 2, 3)), [(255, 255, 255)] * 3),
        (saved(Image.fromarray(GRAY)), [(0, 0, 0), (0, 0, 0), (1, 1, 1)]),
        (saved(Image.new("1", (5, 5), 1)), [(255, 255, 255)] * 3),
        (saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100), [(255, 0, 0)] * 3),
    ],
)
def test_every_kind_of_pixel_is_shown_as_viewers_show_it(data: bytes, expected: list[tuple[int, ...]]):
    assert shown(data) == expected


def progressive(num_more: int) -> bytes:
    """Return a progressive JPEG whose last scan comes so many times more."""
    data = saved(Image.new("L", (640, 640), 128), "JPEG", progressive=True)
    start, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[start:end] * num_more + data[end:]


def test_scans_are_counted_as_a_decoder_reads_them():
    assert num_scans(saved(Image.new("RGB", (64, 64)), "JPEG")) == 1
    usual = num_scans(progressive(0))
    assert usual > 1
    assert num_scans(progressive(7)) == usual + 7
    comment = b"\xff\xfe\x00\x06\xff\xda\xff\xda"  # what looks like a scan, and is a comment
    data = progressive(0)
    assert num_scans(data[:2] + comment + data[2:]) == usual
    assert num_scans(b"\xff\xd8\xff") == 0


def test_a_jpeg_whose_scans_would_take_hours_is_refused(monkeypatch: pytest.MonkeyPatch):
    assert codec.decode(progressive(0)).size == (640, 640)
    data = progressive(3000)
    assert image_header.read_header(data).width == 640
    monkeypatch.setattr(Image.Image, "convert", None)  # nothing is decoded
    with pytest.raises(InvalidRequest, match=r"an image of 640 x 640 pixels has 30\d\d scans; expected at most 2621"):
        codec.decode(data)


def test_an_image_is_there_while_another_is_decoded(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """The engine's thread asks for images between two steps of everybody's rows."""
    processor: Any = engine.chat.images
    one, slow = image_bytes(), image_bytes(shade=4)
    processor.tokens_of(one)
    begun, may_end = threading.Event(), threading.Event()

    def decode_slowly(data: bytes) -> Image.Image:
        begun.set()
        assert may_end.wait(60)
        return decode(data)

    decode = codec.decode
    monkeypatch.setattr(codec, "decode", decode_slowly)
    others = threading.Thread(target=processor.tokens_of, args=(slow,), daemon=True)
    others.start()
    assert begun.wait(60)
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(processor.process(digest_of(one), one)), daemon=True)
    asking.start()
    asking.join(60)
    may_end.set()
    others.join(60)
    assert found


def test_images_whose_features_are_computed_make_room_first(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    processor: Any = engine.chat.images
    files = [image_bytes(shade=shade) for shade in (20, 21, 22)]
    digests = [digest_of(file) for file in files]
    for file in files[:2]:
        processor.tokens_of(file)
    processor.release(digests[1])
    monkeypatch.setattr(codec, "MAX_BYTES", 2 * processor.process(digests[1], files[1]).num_bytes)
    processor.release(digests[1])
    processor.tokens_of(files[2])
    assert digests[1] not in processor._kept
    assert digests[2] in processor._kept


def test_what_a_processor_cannot_resize_is_refused(engine: Engine):
    with pytest.raises(InvalidRequest, match="an image cannot be resized as the model's processor does: ValueError"):
        engine.chat.images.tokens_of(image_bytes(800, 4))  # to a height of 0: the side of this model's images is 32
