"""Load checkpoints with the engine's loader, in a process of its own."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from survey.other_process import OtherProcess, ProcessDied

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Served:
    """What the engine computes for the rows, or why it does not."""

    logprobs: list[np.ndarray] = field(default_factory=list)  # [length, vocab] per row, within the served context
    refusal: str = ""  # the text of the LoadError
    crash: str = ""  # any other error, or the death of the process


class Loader(OtherProcess):
    """A context in which checkpoints are loaded by another process."""

    def serve(self, folder: Path, rows: list[list[int]], *, checks_settings: bool) -> Served:
        """Load the checkpoint and compute the rows. Without `checks_settings`, the table of settings is not asked."""
        try:
            return self.run(_serve, str(folder), rows, checks_settings, timeout_s=TIMEOUT_S)
        except ProcessDied:
            return Served(crash="the process died")


def _serve(folder: str, rows: list[list[int]], checks_settings: bool) -> Served:
    import mlx.core as mx

    from scorepool.engine.errors import LoadError
    from scorepool.engine.model import kv_cache
    from scorepool.engine.model.load import count_logits, load_checked
    from scorepool.engine.sampling.scoring import log_normalizer

    try:
        model, _, position_limit = load_checked(Path(folder), "float32", checks_settings=checks_settings)
        count_logits(model)
        logprobs = []
        for row in rows:
            logits = model(mx.array([row[:position_limit]]), cache=kv_cache.new(model))[0].astype(mx.float32)
            logprobs.append(np.array(logits - log_normalizer(logits)[:, None]))
        return Served(logprobs)
    except LoadError as error:
        return Served(refusal=str(error))
    except (Exception, SystemExit) as error:  # any: the survey reports it; mlx-lm's olmo exits
        return Served(crash=f"{type(error).__name__}: {error}")
