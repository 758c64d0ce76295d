"""Run a multiple-choice task of lm-evaluation-harness that is defined in Python.

python examples/lm_eval_task.py [URL]
"""

import sys

from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

import scorepool.integrations.lm_eval  # noqa: F401 (registers the model)

QUESTIONS = [
    {"question": "If the file does not exist,", "choices": [" banana.", " an error is raised."], "answer": 1},
    {"question": "import", "choices": [" and and", " os"], "answer": 1},
    {"question": "raise", "choices": [" the the", " ValueError"], "answer": 1},
]
task = ConfigurableTask(
    config={
        "task": "documentation",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(QUESTIONS)},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
)

address = f",base_url={sys.argv[1]}" if sys.argv[1:] else ""
report = simple_evaluate(
    "scorepool",
    model_args=f"model=demo{address}",
    tasks=[task],
    task_manager=TaskManager(include_defaults=False),  # reading lm_eval's own tasks takes seconds
    bootstrap_iters=0,
)
print("acc", report["results"]["documentation"]["acc,none"])
print("weights", report["config"]["model_fingerprint"][:12])
