"""A bad network between one host and Redis: a TCP proxy that delays, narrows, holds, loses and cuts.

    worker ──► TCP port of the Link ──► up: wire ──► delay line ──► Redis
           ◄── delay line ◄── wire :down ◄──

It imitates what TCP shows to a program, not packets:

    delay, jitter    each byte comes later; a new connection also pays a round trip. Throughput stays what it was
    rate             bytes per second of all connections of a direction together, which take turns. A connection has
                     room for `buffer_bytes` in front of the narrow link; then its sender waits
    paused           nothing passes, and nothing is lost: TCP sends it again when the hole is over
    dropping         nothing passes, and what is under way is lost. Connections of that time stay open and silent for
                     ever, also afterwards, as behind a router that has forgotten them: they are half-open
    largest_burst    the MTU black hole: a longer write stops its direction of the connection for ever
    lose_next_reply  a reply of Redis is lost, and its connection is half-open from then on, or reset

All links of a process share one thread. Their methods may be called from any thread.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

KERNEL_BUFFER_BYTES = 64 * 1024  # of the proxy's sockets, so that a sender notices soon that the link is narrow
PIECE_BYTES = 4096  # that a connection may send before others have their turn
CATCH_UP_S = 0.005  # of the wire's time that a late timer may make up for
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close sends RST


@dataclass(slots=True)
class LinkSettings:
    """The state of a link. All may change while it runs."""

    delay_s: float = 0.0  # one way
    jitter_s: float = 0.0  # at most so much more, at random. The order of bytes is kept
    up_bytes_s: float | None = None  # from the worker to Redis; None: not limited
    down_bytes_s: float | None = None
    buffer_bytes: int = 256 * 1024  # of one connection and direction, in front of the narrow link
    largest_burst: int | None = None  # bytes that the worker may write at once
    is_paused: bool = False
    is_dropping: bool = False


class Link:
    """A context in which the proxy listens at `url`, in front of the Redis at `target_url`."""

    def __init__(self, target_url: str, **settings: Any) -> None:
        self.settings = LinkSettings(**settings)
        self.port = 0
        self.num_bytes_up = 0  # that arrived from the worker
        self.num_bytes_down = 0
        self.num_turns = 0  # round trips: how often a worker sent something after it had received something
        self.lost_reply = threading.Event()  # set when `lose_next_reply` has lost one
        self._target = _address(target_url)
        self._loop = _shared_loop()
        self._wires = {"up": Wire(self, "up_bytes_s"), "down": Wire(self, "down_bytes_s")}
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._is_lost: Callable[[bytes], bool] | None = None
        self._resets_after_loss = False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def __enter__(self) -> Self:
        self._call(self._listen())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._call(self._close())

    def change(self, **settings: Any) -> None:
        """Change fields of LinkSettings. Returns when they apply."""
        self._call(self._change(settings))

    def pause(self) -> None:
        self.change(is_paused=True)

    def drop(self) -> None:
        self.change(is_dropping=True)

    def restore(self) -> None:
        """End a pause and a drop. Connections of the time of a drop stay half-open."""
        self.change(is_paused=False, is_dropping=False)

    def cut(self) -> None:
        """Reset all connections, at both ends."""
        self._call(self._cut())

    def lose_next_reply(self, mark: bytes | Callable[[bytes], bool], *, resets: bool = False) -> None:
        """Lose the next bytes of Redis that contain `mark`, or of which it is true, and all that follow on them.

        The connection is half-open from then on, or with `resets` is reset at once.
        """
        self._call(self._lose_next(mark, resets))

    async def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BUFFER_BYTES)
        listener.bind(("127.0.0.1", self.port))
        self._server = await self._loop.create_server(lambda: Connection(self).worker, sock=listener, backlog=128)
        self.port = listener.getsockname()[1]

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._cut()

    async def _change(self, settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            if name not in LinkSettings.__slots__:
                raise TypeError(f"{name} is no field of LinkSettings")
            setattr(self.settings, name, value)
        for connection in self._connections if self.settings.is_dropping else ():
            connection.lose()
        for wire in self._wires.values():
            wire.serve()
        for connection in list(self._connections):
            connection.deliver()

    async def _cut(self) -> None:
        for connection in list(self._connections):
            connection.reset()

    async def _lose_next(self, mark: bytes | Callable[[bytes], bool], resets: bool) -> None:
        self.lost_reply.clear()
        self._is_lost = (lambda data: mark in data) if isinstance(mark, bytes) else mark
        self._resets_after_loss = resets

    def loses(self, connection: "Connection", data: bytes) -> bool:
        """True if this reply is the one to be lost."""
        if self._is_lost is None or not self._is_lost(data):
            return False
        self._is_lost = None
        if self._resets_after_loss:
            connection.reset()
        else:
            connection.lose()
        self.lost_reply.set()
        return True

    def _call(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)


class Wire:
    """One direction of a link, which sends one piece after the other."""

    def __init__(self, link: Link, rate_name: str) -> None:
        self._link = link
        self._rate_name = rate_name
        self._loop = link._loop
        self._ready: deque[Stream] = deque()  # with bytes that wait, each once
        self._is_free_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: "Stream") -> None:
        self._ready.append(stream)
        self.serve()

    def serve(self) -> None:
        """Send what the rate allows now, and come again for the rest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        rate = getattr(self._link.settings, self._rate_name)
        while self._ready and not self._link.settings.is_paused:
            now = self._loop.time()
            if rate is not None and self._is_free_at > now:
                self._timer = self._loop.call_at(self._is_free_at, self.serve)
                return
            stream = self._ready.popleft()
            num_bytes = stream.send(None if rate is None else PIECE_BYTES)
            if rate is not None:
                self._is_free_at = max(self._is_free_at, now - CATCH_UP_S) + num_bytes / rate
            if stream.has_waiting:
                self._ready.append(stream)


class Stream:
    """One direction of one connection."""

    def __init__(self, connection: "Connection", wire: Wire) -> None:
        self._link = connection.link
        self._loop = connection.link._loop
        self._wire = wire
        self._waiting = bytearray()  # in front of the wire
        self._has_ended = False  # the source has closed: after what waits comes the end
        self._under_way: deque[tuple[float, bytes | None]] = deque()  # (due, bytes), None for the end
        self._last_due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_dead = False
        self._is_sink_full = False
        self.source: End | None = None
        self.sink: End | None = None

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting) or self._has_ended

    def wait_until(self, at: float) -> None:
        """Let nothing arrive before this time of the loop's clock."""
        self._last_due = max(self._last_due, at)

    def put(self, data: bytes) -> None:
        if self._is_dead:
            return
        was_waiting = self.has_waiting
        self._waiting += data
        if not was_waiting:
            self._wire.add(self)
        self._hold_source()

    def end(self) -> None:
        if self._is_dead or self._has_ended:
            return
        was_waiting = self.has_waiting
        self._has_ended = True
        if not was_waiting:
            self._wire.add(self)

    def die(self) -> None:
        """Lose what is under way and all that follows."""
        self._is_dead = True
        self._has_ended = False
        self._waiting.clear()
        self._under_way.clear()
        self._hold_source()

    def send(self, max_bytes: int | None) -> int:
        """Put the next bytes into the delay line; return how many."""
        if self._is_dead:
            return 0
        data = bytes(self._waiting[:max_bytes])
        del self._waiting[: len(data)]
        settings = self._link.settings
        due = self._loop.time() + settings.delay_s + random.random() * settings.jitter_s
        self._last_due = max(self._last_due, due)
        if data:
            self._under_way.append((self._last_due, data))
        if self._has_ended and not self._waiting:
            self._has_ended = False
            self._under_way.append((self._last_due, None))
        self._hold_source()
        self.deliver()
        return len(data)

    def deliver(self) -> None:
        """Write what is due, and come again for the rest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._under_way and self.sink is not None and not (self._link.settings.is_paused or self._is_sink_full):
            due, data = self._under_way[0]
            if due > self._loop.time():
                self._timer = self._loop.call_at(due, self.deliver)
                return
            self._under_way.popleft()
            self.sink.write(data)

    def set_sink_full(self, is_full: bool) -> None:
        self._is_sink_full = is_full
        self._hold_source()
        self.deliver()

    def _hold_source(self) -> None:
        if self.source is not None:
            is_full = len(self._waiting) >= self._link.settings.buffer_bytes
            self.source.hold(self._is_dead or self._is_sink_full or is_full)


class End(asyncio.Protocol):
    """One of the two sockets of a connection."""

    def __init__(
        self, connection: "Connection", on_data: Callable[[bytes], None], outgoing: Stream, incoming: Stream
    ) -> None:
        self.transport: asyncio.Transport | None = None
        self._connection = connection
        self._on_data = on_data
        self._outgoing = outgoing  # what this end sends
        self._incoming = incoming  # what it receives
        self._is_held = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._outgoing.source = self
        self._incoming.sink = self
        self._incoming.deliver()
        self._connection.on_opened(self)

    def data_received(self, data: bytes) -> None:
        self._on_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._outgoing.end()
        self._connection.on_closed()

    def pause_writing(self) -> None:
        self._incoming.set_sink_full(True)

    def resume_writing(self) -> None:
        self._incoming.set_sink_full(False)

    def hold(self, is_held: bool) -> None:
        if self.transport is None or self.transport.is_closing() or is_held == self._is_held:
            return
        self._is_held = is_held
        if is_held:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def write(self, data: bytes | None) -> None:
        """Write bytes, or close."""
        if self.transport is None or self.transport.is_closing():
            return
        if data is None:
            self.transport.close()
        else:
            self._connection.on_delivered(self)
            self.transport.write(data)

    def reset(self) -> None:
        if self.transport is None:
            return
        with contextlib.suppress(OSError):
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.transport.abort()


class Connection:
    """A connection of the worker, and the one to Redis that belongs to it."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._up = Stream(self, link._wires["up"])
        self._down = Stream(self, link._wires["down"])
        self.worker = End(self, self._on_sent, self._up, self._down)
        self.redis = End(self, self._on_reply, self._down, self._up)
        self._num_open_ends = 0
        self._opening: asyncio.Task[None] | None = None
        self._was_received = True

    async def _open(self) -> None:
        """Connect to Redis, as if the worker's connection had needed a round trip."""
        if self.link.settings.is_dropping:
            self.lose()
            return
        self._up.wait_until(self.link._loop.time() + 3 * self.link.settings.delay_s)
        try:
            if isinstance(self.link._target, str):
                await self.link._loop.create_unix_connection(lambda: self.redis, self.link._target)
            else:
                await self.link._loop.create_connection(lambda: self.redis, *self.link._target)
        except OSError:
            self.reset()

    def deliver(self) -> None:
        self._up.deliver()
        self._down.deliver()

    def lose(self) -> None:
        """Make it half-open: nothing passes any more, and neither end is told."""
        self._up.die()
        self._down.die()

    def reset(self) -> None:
        self.lose()
        self.worker.reset()
        self.redis.reset()

    def _on_sent(self, data: bytes) -> None:
        self.link.num_bytes_up += len(data)
        self.link.num_turns += self._was_received
        self._was_received = False
        largest = self.link.settings.largest_burst
        if largest is not None and len(data) > largest:
            self._up.die()
        else:
            self._up.put(data)

    def _on_reply(self, data: bytes) -> None:
        self.link.num_bytes_down += len(data)
        if not self.link.loses(self, data):
            self._down.put(data)

    def on_delivered(self, end: End) -> None:
        self._was_received |= end is self.worker

    def on_opened(self, end: End) -> None:
        self._num_open_ends += 1
        if end is self.worker:
            self.link._connections.add(self)
            self._opening = self.link._loop.create_task(self._open())

    def on_closed(self) -> None:
        self._num_open_ends -= 1
        if not self._num_open_ends:
            self.link._connections.discard(self)


def _address(url: str) -> str | tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return unquote(parts.path)
    return parts.hostname or "127.0.0.1", parts.port or 6379


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def _shared_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all links. Its thread starts with the first."""
    global _loop
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="links", daemon=True).start()
        return _loop
