"""The hook of macOS's power notifications, with a fake IOKit: it has not been run on a Mac."""

import ctypes
import logging
import queue
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from scorepool.worker.machine import sleep_hook
from scorepool.worker.machine.sleep_hook import Frameworks, SleepHook, load_frameworks
from tests.worker.conftest import until

CAN_SLEEP, WILL_SLEEP, WILL_NOT_SLEEP, HAS_POWERED_ON, WILL_POWER_ON = (
    0xE0000000 | number
    for number in (0x270, 0x280, 0x290, 0x300, 0x320)  # IOKit/IOMessage.h
)
ROOT_PORT, PORT, NOTIFIER, SOURCE, LOOP, MODE = 7, 0x7F0000000010, 9, 0x7F0000000020, 0x7F0000000030, 0x7F0000000040


class FakeMac:
    """IOKit and CoreFoundation as the hook uses them. `events` is what happened, in order."""

    def __init__(self) -> None:
        self.events: list[object] = []
        self.messages: queue.Queue[tuple[int, int]] = queue.Queue()
        self.callback: Callable[..., None] | None = None
        self.root_port = ROOT_PORT
        self.has_source = False
        iokit = {
            "IORegisterForSystemPower": lambda *arguments: self.register(*arguments),
            "IODeregisterForSystemPower": lambda notifier: self.events.append(("deregister", notifier._obj.value)),
            "IOAllowPowerChange": lambda port, argument: self.events.append(("allow", port, argument)),
            "IOServiceClose": lambda port: self.events.append(("close", port)),
            "IONotificationPortGetRunLoopSource": lambda port: SOURCE if port.value == PORT else None,
            "IONotificationPortDestroy": lambda port: self.events.append(("destroy", port.value)),
        }
        foundation = {
            "CFRunLoopGetCurrent": lambda: LOOP,
            "CFRunLoopAddSource": lambda *arguments: self.add_source(*arguments),
            "CFRunLoopRunInMode": lambda *arguments: self.run(*arguments),
        }
        self.frameworks = Frameworks(SimpleNamespace(**iokit), SimpleNamespace(**foundation), ctypes.c_void_p(MODE))

    def register(self, refcon: object, port: Any, callback: Callable[..., None], notifier: Any) -> int:
        port._obj.value, notifier._obj.value = PORT, NOTIFIER
        self.callback = callback
        return self.root_port

    def add_source(self, loop: int, source: int, mode: ctypes.c_void_p) -> None:
        self.has_source = (loop, source, mode.value) == (LOOP, SOURCE, MODE)

    def run(self, mode: ctypes.c_void_p, seconds: float, returns_after_source: bool) -> int:
        if not self.has_source:
            return 1
        try:
            message, argument = self.messages.get(timeout=seconds)
        except queue.Empty:
            return 3  # timed out
        assert self.callback is not None
        self.callback(None, 0, message, argument)
        self.messages.task_done()
        return 4

    def send(self, *messages: int) -> None:
        """Send messages, each with an argument of its own, and wait until all are handled."""
        for message in messages:
            self.messages.put((message, message & 0xFFF | 1 << 40))
        self.messages.join()


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> FakeMac:
    mac = FakeMac()
    monkeypatch.setattr(sleep_hook, "load_frameworks", lambda: mac.frameworks)
    monkeypatch.setattr(sleep_hook, "TURN_S", 0.05)
    return mac


@contextmanager
def hooked(mac: FakeMac, before: Callable[[], None] | None = None) -> Iterator[SleepHook]:
    log = logging.getLogger("test")
    with SleepHook(before or (lambda: mac.events.append("before")), lambda: mac.events.append("after"), log) as hook:
        yield hook


def allowed(message: int) -> tuple[str, int, int]:
    return "allow", ROOT_PORT, message & 0xFFF | 1 << 40


def test_leases_are_handed_back_before_the_sleep_is_allowed_and_work_is_taken_up_after_it(mac: FakeMac):
    with hooked(mac):
        mac.send(CAN_SLEEP, WILL_SLEEP, WILL_POWER_ON, HAS_POWERED_ON)

        assert mac.events == [allowed(CAN_SLEEP), "before", allowed(WILL_SLEEP), "after"]
    assert mac.events[4:] == [("deregister", NOTIFIER), ("close", ROOT_PORT), ("destroy", PORT)]


def test_a_sleep_that_another_program_refused_changes_nothing(mac: FakeMac):
    with hooked(mac):
        mac.send(CAN_SLEEP, WILL_NOT_SLEEP)

        assert mac.events == [allowed(CAN_SLEEP)]


def test_an_error_before_the_sleep_is_logged_and_does_not_keep_the_mac_awake(
    mac: FakeMac, caplog: pytest.LogCaptureFixture
):
    def fail() -> None:
        raise ConnectionError("Redis is away")

    with hooked(mac, fail):
        mac.send(WILL_SLEEP, HAS_POWERED_ON)

        assert mac.events == [allowed(WILL_SLEEP), "after"]
    assert "Redis is away" in caplog.text


def test_every_function_has_a_signature(mac: FakeMac):
    """Without one, ctypes passes and returns 32 bits."""
    mac.frameworks.declare()
    for library in (mac.frameworks.iokit, mac.frameworks.core_foundation):
        for name, function in vars(library).items():
            assert isinstance(function.argtypes, list), name
    assert mac.frameworks.iokit.IOAllowPowerChange.argtypes == [ctypes.c_uint32, ctypes.c_ssize_t]
    assert mac.frameworks.iokit.IONotificationPortGetRunLoopSource.restype is ctypes.c_void_p


def test_a_mac_that_refuses_the_registration_works_on(mac: FakeMac, caplog: pytest.LogCaptureFixture):
    mac.root_port = 0
    with hooked(mac):
        until(lambda: "does not see when the Mac sleeps" in caplog.text)
    assert mac.events == []


@pytest.mark.parametrize("missing", ["a library", "a function"])
def test_a_system_without_iokit_works_on(
    mac: FakeMac, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, missing: str
):
    def no_library() -> None:
        raise OSError("image not found")

    if missing == "a library":
        monkeypatch.setattr(sleep_hook, "load_frameworks", no_library)
    else:
        del mac.frameworks.iokit.IOAllowPowerChange
    with hooked(mac):
        assert mac.callback is None
    assert "does not see when the Mac sleeps" in caplog.text


def test_notifications_that_end_are_logged_and_their_thread_ends(mac: FakeMac, caplog: pytest.LogCaptureFixture):
    with hooked(mac) as hook:
        mac.send(CAN_SLEEP)
        mac.has_source = False
        until(lambda: "the notifications ended" in caplog.text)
        thread = hook._thread
        assert thread is not None
        until(lambda: not thread.is_alive())


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has the libraries")
def test_other_systems_register_nothing():
    assert load_frameworks() is None
    with SleepHook(lambda: None, lambda: None, logging.getLogger("test")) as hook:
        assert hook._thread is None
