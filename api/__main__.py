"""`python -m api`: settings from the environment."""

import sys

from api.serve import serve
from wire import Settings, SettingsError


def main() -> None:
    try:
        serve(Settings.load())
    except SettingsError as error:
        sys.exit(f"scorepool: {error}")


if __name__ == "__main__":
    main()
