"""Run `python -m scorepool.api` with settings from the environment."""

import argparse

from scorepool.api.serve import serve
from scorepool.store import Settings, SettingsError, logs


def main() -> None:
    """Serve until the process is asked to stop; exit with one sentence if a setting is wrong."""
    about = "Serve the HTTP API. There are no options: settings are environment variables, listed in docs/settings.md."
    argparse.ArgumentParser("python -m scorepool.api", description=about).parse_args()
    try:
        serve(Settings.load())
    except SettingsError as error:
        logs.end_process(str(error), "api")


if __name__ == "__main__":
    main()
