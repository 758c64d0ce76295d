"""What a Mac has to be spared for: heat, low memory, battery. It lowers the batch budget.

    pmset -g therm                    CPU_Speed_Limit below 100, or a warning level above 0       heat
    sysctl -n kern.memorystatus_vm_pressure_level    1 normal, 2 warning, 4 critical              memory
    pmset -g batt                     "Now drawing from 'Battery Power'", and the charge          battery

Other systems run nothing. A command that fails or says something else is no strain. The tests run it on Linux with fake
commands; it has not been run on a Mac.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Literal

Strain = Literal["heat", "memory", "battery"]  # as wire.Strain, which this room does not import
COMMAND_S = 5.0  # after which a command is given up
LOW_CHARGE = 20  # percent
MIN_SPEED = 50  # percent of the CPU's speed, below which the heat is severe


class StrainGauge:
    """Read the strain on demand, from one thread: three processes of some milliseconds."""

    def __init__(self, run: Callable[..., str] | None = None) -> None:
        self._run = run or _run

    def read(self) -> Mapping[Strain, float]:
        """Return what strains the machine, each with the share of the budget that it leaves."""
        if sys.platform != "darwin":
            return {}
        found: dict[Strain, float | None] = {
            "heat": heat_share(self._run("pmset", "-g", "therm")),
            "memory": memory_share(self._run("sysctl", "-n", "kern.memorystatus_vm_pressure_level")),
            "battery": battery_share(self._run("pmset", "-g", "batt")),
        }
        return {strain: share for strain, share in found.items() if share is not None}


def heat_share(text: str) -> float | None:
    """Read `pmset -g therm`; None without a limit. "Note: No thermal warning level has been recorded" is none."""
    speed = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", text)
    warning = re.search(r"(?:thermal|performance) warning level\s*[=:]\s*(\d+)", text, re.IGNORECASE)
    if speed and int(speed[1]) < 100:
        return 0.25 if int(speed[1]) < MIN_SPEED else 0.5
    return 0.5 if warning and int(warning[1]) > 0 else None


def memory_share(text: str) -> float | None:
    """Read the level of memory pressure; None if it is normal."""
    return {"2": 0.5, "4": 0.25}.get(text.strip())


def battery_share(text: str) -> float | None:
    """Read `pmset -g batt`; None on mains power."""
    if "'Battery Power'" not in text:
        return None
    charge = re.search(r"\b(\d{1,3})%", text)
    return 0.25 if charge and int(charge[1]) < LOW_CHARGE else 0.5


def _run(*command: str) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=COMMAND_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
