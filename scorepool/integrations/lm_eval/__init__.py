"""The model `scorepool` of lm-evaluation-harness. Importing this registers it.

    model.py        ScorepoolLM: requests of the harness to jobs, results of jobs to answers
    arguments.py    its arguments are checked
    jobs.py         run jobs and delete them
    tokenizers.py   the model's tokenizer, loaded here or used through the server
    __main__.py     the command of lm_eval with this model registered

lm_eval looks for models in its own package alone, so its own command does not know this one. Use

    python -m scorepool.integrations.lm_eval --model scorepool --model_args model=demo --tasks my_task
"""

from scorepool.integrations.lm_eval.model import ScorepoolLM

__all__ = ["ScorepoolLM"]
