"""Heat, low memory and battery are read from macOS's commands. With fake commands: not run on a Mac."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from scorepool.worker.machine import strain
from scorepool.worker.machine.strain import StrainGauge

COOL = """Note: No thermal warning level has been recorded
Note: No performance warning level has been recorded
Note: No CPU power status has been recorded
"""
HOT = """2026-07-01 12:00:00 +0200 CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 8
\tCPU_Speed_Limit \t= {speed}
"""
MAINS = """Now drawing from 'AC Power'
 -InternalBattery-0 (id=4653155)\t12%; charging; 2:10 remaining present: true
"""
BATTERY = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=4653155)\t{charge}%; discharging; 5:02 remaining present: true
"""


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder whose files `therm`, `batt` and `memory` are what the fake commands print."""
    monkeypatch.setattr(strain, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    programs = {
        "pmset": f'test "$1" = -g && cat {tmp_path}/$2',
        "sysctl": f'test "$*" = "-n kern.memorystatus_vm_pressure_level" && cat {tmp_path}/memory',
    }
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    for name, text in {"therm": COOL, "batt": MAINS, "memory": "1\n"}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("therm", COOL, {}),
        ("therm", HOT.format(speed=100), {}),
        ("therm", HOT.format(speed=80), {"heat": 0.5}),
        ("therm", HOT.format(speed=40), {"heat": 0.25}),
        ("therm", "Thermal warning level = 2\n", {"heat": 0.5}),
        ("therm", "Thermal warning level = 0\n", {}),
        ("memory", "1\n", {}),
        ("memory", "2\n", {"memory": 0.5}),
        ("memory", "4\n", {"memory": 0.25}),
        ("memory", "garbage\n", {}),
        ("batt", MAINS, {}),
        ("batt", "Now drawing from 'AC Power'\n", {}),
        ("batt", BATTERY.format(charge=80), {"battery": 0.5}),
        ("batt", BATTERY.format(charge=100), {"battery": 0.5}),
        ("batt", BATTERY.format(charge=19), {"battery": 0.25}),
    ],
)
def test_each_strain_leaves_a_share_of_the_budget(mac: Path, file: str, text: str, expected: dict[str, float]):
    (mac / file).write_text(text)
    assert StrainGauge().read() == expected


def test_commands_that_fail_or_are_missing_are_no_strain(mac: Path, monkeypatch: pytest.MonkeyPatch):
    (mac / "batt").write_text(BATTERY.format(charge=5))
    (mac / "pmset").write_text(f"#!/bin/sh\ncat {mac}/batt\nexit 1\n")
    assert StrainGauge().read() == {}
    monkeypatch.setenv("PATH", "")
    assert StrainGauge().read() == {}
    monkeypatch.setattr(strain, "sys", SimpleNamespace(platform="linux"))
    assert StrainGauge(lambda *_: BATTERY).read() == {}
