"""The two clocks of a machine that sleeps. They agree while it is awake, and a test replaces both through `time` here.

    clock_s()  goes on during sleep, like Redis's clock: leases, deadlines that clients know, intervals of tasks
    awake_s()  stops during sleep: how long this process has worked on something (time-outs of jobs, the watchdog)

A wait of a thread (`Event.wait`, `Queue.get`, `time.sleep`) stands still during sleep, so a loop that waits for a
time of `clock_s` waits a second at most, and looks again.
"""

import time

# On Linux CLOCK_MONOTONIC stops during sleep and CLOCK_BOOTTIME goes on; macOS has no CLOCK_BOOTTIME, and its
# CLOCK_MONOTONIC goes on.
_GOES_ON = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def clock_s() -> float:
    """Return a monotonic time, s, that goes on while the machine sleeps."""
    return time.clock_gettime(_GOES_ON)


def awake_s() -> float:
    """Return a monotonic time, s, that stops while the machine sleeps."""
    return time.monotonic()
