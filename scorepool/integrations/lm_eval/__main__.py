"""Run the command of lm-evaluation-harness. Importing the package has registered the model `scorepool`.

A wrong argument, what the server refuses, and that it is away, is one sentence on stderr, with exit status 1.
"""

import sys

from lm_eval.__main__ import cli_evaluate

from scorepool.integrations.lm_eval.arguments import ArgumentError
from scorepool.sdk import InvalidUrl, NotScorepool, ScorepoolError, Unreachable

INTERRUPTED = 130  # as shells call the end by Ctrl-C

if __name__ == "__main__":
    try:
        cli_evaluate()
    except (ArgumentError, InvalidUrl, NotScorepool, ScorepoolError, Unreachable) as error:
        sys.exit(f"scorepool: {error}")
    except KeyboardInterrupt:
        print("scorepool: stopped; jobs that had not ended are canceled", file=sys.stderr)  # noqa: T201
        sys.exit(INTERRUPTED)
