"""Lower the engines' budget while the machine is strained, and say so."""

import logging
from collections.abc import Mapping

from scorepool.engine import Engine, EngineError, SetBudget
from scorepool.worker.machine.strain import Strain, StrainGauge

log = logging.getLogger(__name__)
EVERY_S = 15.0


class Budget:
    """Share of the batch's tokens and rows that engines may use. `update` runs on the thread of periodic tasks."""

    def __init__(self, *engines: Engine, gauge: StrainGauge | None = None) -> None:
        self._engines = engines
        self._gauge = gauge or StrainGauge()
        self.share = 1.0  # any thread may read these two
        self.strains: Mapping[Strain, float] = {}

    def update(self) -> None:
        """Read the strain, and change the budget between two steps if it is another."""
        strains = self._gauge.read()
        if strains == self.strains:
            return
        lost_memory = "memory" in strains and strains["memory"] < self.strains.get("memory", 1.0)
        share = min(strains.values(), default=1.0)
        try:
            for engine in self._engines:
                engine.control(SetBudget(share))
                if lost_memory:
                    engine.clear_prefix_cache()
        except EngineError:  # it has ended: the loop reports that
            return
        self.strains, self.share = strains, share
        why = ", ".join(strains) or "the machine is at ease"
        log.warning("the batch budget is %d %% from now on: %s", round(100 * share), why)
