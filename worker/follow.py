"""A rank of a worker that is not its first: `python -m scorepool.worker.follow NAME FOLDER_OR_HUB_ID`.

`scorepool worker --ranks N` runs it. It holds a share of the model and computes what the first rank says, which alone
knows Redis and the jobs. It ends with the first rank, and not at a signal before it. Exit status: 0 the first rank has
closed; 1 the model cannot be loaded, or a rank has gone.
"""

import logging
import signal
import sys

from scorepool.engine import LoadError
from scorepool.engine.model.load import follow
from scorepool.engine.trial import prevent_torch_import
from scorepool.store import Settings, SettingsError, logs
from scorepool.worker.engine_settings import engine_settings

log = logging.getLogger("scorepool.worker.follow")  # this is __main__


def main(name: str, source: str) -> None:
    """Follow the first rank until it closes."""
    try:
        settings = Settings.load()
        logs.configure("worker", settings.log_format, settings.log_level)
        prevent_torch_import()
        for number in (signal.SIGINT, signal.SIGTERM):  # mlx.launch sends them to all ranks
            signal.signal(number, signal.SIG_IGN)
        follow(engine_settings(source, settings, name))
    except (LoadError, SettingsError) as error:
        raise SystemExit(f"scorepool: {error}") from None
    except RuntimeError as error:
        raise SystemExit(f"scorepool: the first rank has gone: {error}") from None
    log.info("the first rank has closed")


if __name__ == "__main__":
    main(*sys.argv[1:])
