"""Run the command of lm-evaluation-harness. Importing the package has registered the model `scorepool`."""

from lm_eval.__main__ import cli_evaluate

if __name__ == "__main__":
    cli_evaluate()
