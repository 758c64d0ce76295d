"""Survey families of models, and write what was found.

    python -m survey [FAMILY ...] [--seed 0] [--setting NAME] [--raw]

`--raw` bypasses the table of settings (engine/model/surveyed.py): that is how the table is made.
"""

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict

from survey import table
from survey.families import FAMILIES
from survey.run import NotBuilt, survey


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="all, if none is named")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--setting", default="", help="only settings that begin so")
    parser.add_argument("--raw", action="store_true", help="do not ask the table of settings")
    parser.add_argument("--write", action="store_true", help="write the family's file; implies --raw")
    parser.add_argument("--json", help="append the findings to this file")
    arguments = parser.parse_args()
    for name in arguments.families or FAMILIES:
        started_at, counts = time.monotonic(), Counter[str]()
        try:
            raw = arguments.raw or arguments.write
            findings = []
            for found in survey(FAMILIES[name], arguments.seed, checks_settings=not raw, only=arguments.setting):
                findings.append(found)
                counts[found.outcome] += 1
                if arguments.json:
                    with open(arguments.json, "a") as file:
                        file.write(json.dumps(asdict(found), default=str) + "\n")
                if found.outcome != "agrees" or not found.setting:
                    matters = "" if found.matters else " (does not matter)"
                    change = f"{name:16} {found.base:10} {found.setting}={found.value!r:.60}"
                    print(f"{change}: {found.outcome} {found.detail:.140}{matters}", flush=True)
            if arguments.write:
                table.write(name, findings)
        except NotBuilt as error:
            print(f"{name}: the base cannot be built: {error}")
        print(f"{name}: {dict(counts)}, {time.monotonic() - started_at:.0f} s", flush=True)


if __name__ == "__main__":
    main()
