"""Call back before a Mac sleeps and after it woke, through IOKit's documented notifications of system power.

Other systems register nothing. The tests run it on Linux with a fake IOKit; it has not been run on a Mac.

    kIOMessageCanSystemSleep      the Mac is idle and asks   allowed at once: its operator decides whether it may sleep
    kIOMessageSystemWillSleep     it sleeps within 30 s      `before_sleep`, then allowed
    kIOMessageSystemHasPoweredOn  it has woken for its user  `after_wake`

A wake without a user (Power Nap) sends no message, so the worker stays as `before_sleep` left it.
"""

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from logging import Logger
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self

CAN_SLEEP = 0xE0000270
WILL_SLEEP = 0xE0000280
HAS_POWERED_ON = 0xE0000300
RUN_LOOP_FINISHED = 1  # kCFRunLoopRunFinished: the run loop has no source any more
TURN_S = 0.5  # of the run loop, after which it sees that the hook is closed

# void (*)(void *refcon, io_service_t service, natural_t message_type, void *message_argument)
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class Frameworks:
    """macOS's libraries, whose functions have no signatures yet."""

    iokit: Any
    core_foundation: Any
    default_mode: Any  # kCFRunLoopDefaultMode, a CFStringRef

    def declare(self) -> Self:
        """Declare the signatures: without them ctypes cuts pointers to 32 bits."""
        pointer, port, number = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int32
        iokit, foundation = self.iokit, self.core_foundation
        for function, result, arguments in (
            (iokit.IORegisterForSystemPower, port, [pointer, pointer, _CALLBACK, pointer]),
            (iokit.IODeregisterForSystemPower, number, [pointer]),
            (iokit.IOAllowPowerChange, number, [port, ctypes.c_ssize_t]),
            (iokit.IOServiceClose, number, [port]),
            (iokit.IONotificationPortGetRunLoopSource, pointer, [pointer]),
            (iokit.IONotificationPortDestroy, None, [pointer]),
            (foundation.CFRunLoopGetCurrent, pointer, []),
            (foundation.CFRunLoopAddSource, None, [pointer, pointer, pointer]),
            (foundation.CFRunLoopRunInMode, number, [pointer, ctypes.c_double, ctypes.c_bool]),
        ):
            function.restype, function.argtypes = result, arguments
        return self


def load_frameworks() -> Frameworks | None:
    """Load macOS's libraries; None on other systems. Raises OSError, ValueError."""
    if sys.platform != "darwin":
        return None
    folder = "/System/Library/Frameworks"
    foundation = ctypes.CDLL(f"{folder}/CoreFoundation.framework/CoreFoundation")
    default_mode = ctypes.c_void_p.in_dll(foundation, "kCFRunLoopDefaultMode")
    return Frameworks(ctypes.CDLL(f"{folder}/IOKit.framework/IOKit"), foundation, default_mode)


class SleepHook:
    """A context in which `before_sleep` and `after_wake` are called in turn, on a thread of the hook.

    `before_sleep` must return within seconds: macOS sleeps after 30 s anyway. Errors of theirs, and of the
    registration, are logged; a Mac that cannot be registered works on as before.
    """

    def __init__(self, before_sleep: Callable[[], None], after_wake: Callable[[], None], log: Logger) -> None:
        self._before_sleep = before_sleep
        self._after_wake = after_wake
        self._log = log
        self._is_closed = Event()
        self._thread: Thread | None = None
        self._iokit: Any = None
        self._root_port = 0  # io_connect_t
        self._callback = _CALLBACK(self._receive)  # kept: IOKit holds only its address

    def __enter__(self) -> Self:
        try:
            frameworks = load_frameworks()
            if frameworks is not None:
                self._thread = Thread(target=self._run, args=[frameworks.declare()], name="sleep-hook", daemon=True)
                self._thread.start()
        except (OSError, ValueError, AttributeError) as error:  # a library or a function is missing
            self._log.warning("this worker does not see when the Mac sleeps: %s", error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join(timeout=4 * TURN_S)  # a callback that waits must not keep the process alive

    def _run(self, frameworks: Frameworks) -> None:
        iokit, foundation = frameworks.iokit, frameworks.core_foundation
        self._iokit = iokit
        port, notifier = ctypes.c_void_p(), ctypes.c_uint32()
        self._root_port = iokit.IORegisterForSystemPower(
            None, ctypes.byref(port), self._callback, ctypes.byref(notifier)
        )
        if not self._root_port:
            self._log.warning("this worker does not see when the Mac sleeps: IORegisterForSystemPower failed")
            return
        source = iokit.IONotificationPortGetRunLoopSource(port)
        foundation.CFRunLoopAddSource(foundation.CFRunLoopGetCurrent(), source, frameworks.default_mode)
        while not self._is_closed.is_set():
            if foundation.CFRunLoopRunInMode(frameworks.default_mode, TURN_S, False) == RUN_LOOP_FINISHED:
                self._log.warning("this worker no longer sees when the Mac sleeps: the notifications ended")
                break
        iokit.IODeregisterForSystemPower(ctypes.byref(notifier))
        iokit.IOServiceClose(self._root_port)
        iokit.IONotificationPortDestroy(port)

    def _receive(self, refcon: int | None, service: int, message: int, argument: int | None) -> None:
        if message == WILL_SLEEP:
            self._call(self._before_sleep)
        if message in (CAN_SLEEP, WILL_SLEEP):
            self._iokit.IOAllowPowerChange(self._root_port, argument or 0)
        if message == HAS_POWERED_ON:
            self._call(self._after_wake)

    def _call(self, callback: Callable[[], None]) -> None:
        """Call back. An error must not keep the Mac awake, and ctypes would only print it."""
        try:
            callback()
        except Exception:
            self._log.exception("%s failed", callback.__qualname__)
