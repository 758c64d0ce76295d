"""Write random calls in every format, and read them back, streamed and not.

    python -m survey.calls [FORMAT ...] [--num 200] [--seed 0] [--write | --hostile]

Each turn offers random tools (nested schemas) and calls up to three of them, after reasoning and content where the
format has them. Strings hold any characters, and texts that look like the markers of any format. `--write` keeps the
findings in survey/results/calls.json and writes the table of docs/openai.md anew. `--hostile` spoils what was written
(cut, tokens lost or shuffled, calls in reasoning, formats mixed), and checks that the stream is the whole answer and
that entries are aligned.
"""

import argparse
import time

from survey.calls import document, hostile
from survey.calls.read_back import Findings, read_back
from survey.calls.writers import WRITERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", help="all, if none is named")
    parser.add_argument("--num", type=int, default=200, help="turns of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="keep the findings and write the table")
    parser.add_argument("--hostile", action="store_true", help="spoil the turns")
    arguments = parser.parse_args()
    found: dict[str, Findings] = {}
    for name in arguments.formats or WRITERS:
        started_at = time.monotonic()
        if arguments.hostile:
            print(
                f"{name}: {hostile.check(name, arguments.num, arguments.seed, print)} of {arguments.num} wrong",
                flush=True,
            )
            continue
        found[name] = read_back(name, arguments.num, arguments.seed)
        for example in found[name].examples:
            print(example)
        print(f"{name}: {document.summary(found[name])}, {time.monotonic() - started_at:.0f} s", flush=True)
    if arguments.write:
        document.write(found, arguments.seed)


if __name__ == "__main__":
    main()
