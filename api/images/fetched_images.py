"""Put files in the place of the URLs of images, within bounds of an owner and of all.

A few images of an owner are fetched at once, so that slow servers hold up their own user. The bytes count as those of
bodies that the owner sends, from before they come until the jobs are queued.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from scorepool import wire
from scorepool.api.http import tasks
from scorepool.api.http.errors import BadRequest, TooLarge, TooManyUploads
from scorepool.api.http.held_bytes import Held, holding
from scorepool.api.images.image_fetch import FetchFailed, FileTooLarge, ImageFetch
from scorepool.api.images.limits import check_file, parse_url, too_large
from scorepool.store import Settings
from scorepool.store.ssrf_guard import resolve, tls_context
from scorepool.wire.image import MAX_IMAGES

MAX_FETCHES = 32  # at once, of one API process
MAX_FETCHES_OF_OWNER = 4
MAX_WAITING_OF_OWNER = 4 * MAX_IMAGES  # images that wait for others of their owner
MAX_LOOKUPS = 64  # the system's resolver has no timeout, so that a lookup may outlast its fetch

logger = logging.getLogger(__name__)


@dataclass
class _Slots:
    """What an owner may fetch at once."""

    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_FETCHES_OF_OWNER))
    num_images: int = 0  # that are fetched or wait
    num_threads: int = 0  # that fetch, maybe for nobody any more


@dataclass
class _Request:
    """What a request fetches."""

    owner: str
    held: Held
    num_bytes: int = 0


class FetchedImages:
    """Fetches images of one API process."""

    def __init__(self, settings: Settings) -> None:
        """Start no thread: each starts with the first image that needs it."""
        self._settings = settings
        self._tls = functools.cache(tls_context)
        self._threads = ThreadPoolExecutor(MAX_FETCHES, "fetch")
        self._lookups = ThreadPoolExecutor(MAX_LOOKUPS, "lookup")
        self._by_owner: dict[str, _Slots] = {}
        self._running: set[ImageFetch] = set()

    async def close(self) -> None:
        """End what is on its way."""
        for fetch in list(self._running):
            fetch.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._lookups.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def fetched(
        self, owner: str, requests: Sequence[wire.Request], *, is_bulk: bool
    ) -> AsyncGenerator[Sequence[wire.Request]]:
        """Give the requests with files in the place of URLs. Their bytes count as held until the context ends.

        Raises BadRequest, TooLarge, TooManyUploads. The requests were admitted before.
        """
        fields: dict[str, str] = {}  # by URL, where it stands first
        for url, name in _urls(requests, is_bulk):
            fields.setdefault(url, name)
        if not fields:
            yield requests
            return
        if len(fields) > MAX_IMAGES:
            name = next(iter(fields.values()))
            raise TooLarge(
                f"{name}: expected at most {MAX_IMAGES} different URLs of images in one request, found {len(fields)}",
                name,
            )
        with holding(owner, self._settings.max_body_bytes) as held:
            images = await self._fetch_all(_Request(owner, held), fields)
            logger.debug("fetched %d images of %d bytes", len(images), held.num_bytes)
            yield [wire.map_images(request, lambda image: _with_file(image, images)) for request in requests]

    async def _fetch_all(self, request: _Request, fields: Mapping[str, str]) -> dict[str, wire.Image]:
        fetches = {url: asyncio.create_task(self._fetch_one(request, url, name)) for url, name in fields.items()}
        try:
            return {url: await fetch for url, fetch in fetches.items()}
        finally:
            await tasks.cancel_and_wait([*fetches.values()])

    async def _fetch_one(self, request: _Request, url: str, name: str) -> wire.Image:
        """Return one image. Raises ApiError that names its field."""
        slots = self._by_owner.setdefault(request.owner, _Slots())
        if slots.num_images >= MAX_WAITING_OF_OWNER:
            raise TooManyUploads(f"{name}: {slots.num_images} images of yours are being fetched; wait for some of them")
        slots.num_images += 1
        try:
            await self._take(slots, name)
            file = await self._run(slots, url, name, request)
        finally:
            slots.num_images -= 1
            self._drop_if_idle(request.owner, slots)
        try:
            image = wire.Image(data=file)
        except ValueError as error:
            raise BadRequest(f"{name}: {error}", name) from None
        if image.is_video:
            raise BadRequest(f"{name}: expected an image, found a video: videos are not fetched", name)
        check_file(image, name, self._settings)
        request.num_bytes += len(file)
        most = self._settings.max_body_bytes
        if request.num_bytes > most:
            raise TooLarge(f"{name}: expected images of at most {most} bytes together (SCOREPOOL_MAX_BODY_BYTES)", name)
        return image

    async def _take(self, slots: _Slots, name: str) -> None:
        """Wait for a free slot, for as long as a fetch may take: a client may have left, and is not noticed here."""
        limit_s = self._settings.fetch_images_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await slots.free.acquire()
        except TimeoutError:
            raise TooManyUploads(
                f"{name}: {slots.num_images} images of yours are being fetched, {MAX_FETCHES_OF_OWNER} at once; this "
                f"one had no turn within {limit_s:g} s (SCOREPOOL_FETCH_IMAGES_TIMEOUT_S); send it again"
            ) from None

    async def _run(self, slots: _Slots, url: str, name: str, request: _Request) -> bytes:
        """Fetch a file on a thread. The slot is free when the thread is, also if nobody waits for it any more."""
        most, held = self._settings.max_image_bytes, request.held
        fetch = self._new_fetch(url)
        try:
            held.add(most)  # before it comes
            future = self._threads.submit(fetch.run)
        except BaseException:
            slots.free.release()
            raise
        self._running.add(fetch)
        slots.num_threads += 1
        free = functools.partial(self._free, request.owner, slots)
        future.add_done_callback(functools.partial(self._ended, asyncio.get_running_loop(), free, fetch))
        try:
            file = await asyncio.wrap_future(future)
        except FileTooLarge as error:
            raise too_large(name, str(error), self._settings) from None
        except FetchFailed as error:
            raise BadRequest(f"{name}: {error}", name) from None
        finally:
            fetch.stop()
        held.resize(held.num_bytes - most + len(file))
        return file

    def _ended(
        self, loop: asyncio.AbstractEventLoop, free: Callable[[], None], fetch: ImageFetch, future: "Future[bytes]"
    ) -> None:
        """Free the slot. Called on the thread."""
        self._running.discard(fetch)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(free)

    def _free(self, owner: str, slots: _Slots) -> None:
        """Note that a thread of an owner has ended."""
        slots.num_threads -= 1
        slots.free.release()
        self._drop_if_idle(owner, slots)

    def _drop_if_idle(self, owner: str, slots: _Slots) -> None:
        """Drop an owner's slots, unless a thread has one: the owner would get new ones beside it."""
        if not slots.num_images and not slots.num_threads and self._by_owner.get(owner) is slots:
            del self._by_owner[owner]

    def _new_fetch(self, url: str) -> ImageFetch:
        settings = self._settings
        return ImageFetch(
            url,
            lambda each: parse_url(each, settings),
            lambda host, port: self._lookups.submit(resolve, host, port),
            self._tls(),
            settings.max_image_bytes,
            settings.fetch_images_timeout_s,
            allow_private=settings.fetch_images == "any",
        )


def _urls(requests: Sequence[wire.Request], is_bulk: bool) -> list[tuple[str, str]]:
    """Return each URL with the name of its field."""
    return [
        (image.url, f"[{index}].{name}" if is_bulk else name)
        for index, request in enumerate(requests)
        for name, image in wire.images_of(request)
        if image.url is not None
    ]


def _with_file(image: wire.Image, files: Mapping[str, wire.Image]) -> wire.Image:
    return image if image.url is None else wire.Image(data=files[image.url].data, at=image.at)


def has_urls(requests: Sequence[wire.Request]) -> bool:
    """True if an image is given by URL."""
    return bool(_urls(requests, is_bulk=False))
