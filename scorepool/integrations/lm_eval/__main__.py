"""Run the command of lm-evaluation-harness. Importing the package has registered the model `scorepool`.

What the server refuses, and that it is away, is one sentence on stderr, with exit status 1.
"""

import sys

from lm_eval.__main__ import cli_evaluate

from scorepool.integrations.lm_eval.model import NotServed
from scorepool.sdk import InvalidUrl, NotScorepool, ScorepoolError, Unreachable

if __name__ == "__main__":
    try:
        cli_evaluate()
    except (InvalidUrl, NotScorepool, NotServed, ScorepoolError, Unreachable) as error:
        sys.exit(f"scorepool: {error}")
