"""lm-evaluation-harness: its API clients agree with its HF model on the same weights."""

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from scorepool.local.stack import Stack

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from its imports
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.models.api_models import JsonChatStr
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

PAIRS = [
    ("If the file does not exist,", " an error is raised."),
    ("If the file does not exist,", " the"),
    ("import", " os\nimport sys\n"),
    ("", "Return a list of the names of the entries."),
    ("def __init__(self", "):\n    pass"),
    ("The value of ", "x is é and 🙂."),
    ("Return", " True if the object is a list, False otherwise"),
]
TEXTS = [
    "Return the number of items in a container.",
    "x = '🙂 é'\n",
    "import os\n" * 300,
]  # the last one needs several windows


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=args, idx=index) for index, args in enumerate(arguments)]


@pytest.fixture(scope="module")
def own(demo_folder: Path) -> HFLM:
    return HFLM(pretrained=str(demo_folder), device="cpu", dtype="float32", batch_size=4, max_length=1024)


@pytest.fixture(
    scope="module",
    params=[
        "ids in batches",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("text one by one", "text in batches", "server's tokenizer")
        ),
    ],
)
def served(request: pytest.FixtureRequest, stack: Stack, demo_folder: Path) -> LocalCompletionsAPI:
    options: dict[str, Any] = {
        "ids in batches": {"tokenizer_backend": "huggingface", "batch_size": 4, "num_concurrent": 2},
        "text one by one": {"tokenizer_backend": "huggingface", "tokenized_requests": False},
        "text in batches": {"tokenizer_backend": "remote", "tokenized_requests": False, "batch_size": 3},
        "server's tokenizer": {"tokenizer_backend": "auto"},
    }[request.param]
    if options["tokenizer_backend"] == "huggingface":
        options["tokenizer"] = str(demo_folder)
    # Its window is one token shorter than `max_length`, for the token that it generates.
    return LocalCompletionsAPI(base_url=f"{stack.url}/v1/completions", model="demo", max_length=1025, **options)


def test_loglikelihood(own: HFLM, served: LocalCompletionsAPI):
    expected = own.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)

    found = served.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)

    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert all(math.isfinite(value) for value, _ in found)


def test_loglikelihood_rolling(own: HFLM, served: LocalCompletionsAPI):
    arguments = [(text,) for text in TEXTS]
    expected = own.loglikelihood_rolling(instances("loglikelihood_rolling", arguments), disable_tqdm=True)

    found = served.loglikelihood_rolling(instances("loglikelihood_rolling", arguments), disable_tqdm=True)

    assert found == pytest.approx(expected, rel=1e-5, abs=1e-4)


def test_generate_until(own: HFLM, served: LocalCompletionsAPI):
    asked = {"until": ["\n", "."], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
    arguments = [(prompt, asked) for prompt, _ in PAIRS if prompt]
    expected = own.generate_until(instances("generate_until", [(p, dict(a)) for p, a in arguments]), disable_tqdm=True)

    found = served.generate_until(instances("generate_until", [(p, dict(a)) for p, a in arguments]), disable_tqdm=True)

    assert found == expected


@pytest.mark.parametrize(
    ("until", "num_concurrent"),
    [
        (["\n", ".", "q", "z", "the v", "\x00"], 3),
        *(
            pytest.param(until, num_concurrent, marks=pytest.mark.soak)
            for until, num_concurrent in [
                (["\n", ".", "q", "z", "the v", "\x00"], 1),
                *(("\n", 1), ("\n", 3)),
                *(([], 1), ([], 3)),
            ]
        ),
    ],
)
def test_generate_until_of_chats(own: HFLM, stack: Stack, until: list[str] | str, num_concurrent: int):
    url = f"{stack.url}/v1/chat/completions"
    served = LocalChatCompletion(base_url=url, model="demo", num_concurrent=num_concurrent, eos_string="<|im_end|>")
    chats = [[{"role": "user", "content": prompt}] for prompt, _ in PAIRS if prompt]
    # This client sends the first four entries of a list.
    shown = until[:4] if isinstance(until, list) else until
    asked = {"max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
    texts = [(own.apply_chat_template(chat), asked | {"until": shown}) for chat in chats]
    expected = own.generate_until(instances("generate_until", texts), disable_tqdm=True)

    sent = [(JsonChatStr(json.dumps(chat)), asked | {"until": until}) for chat in chats]
    found = served.generate_until(instances("generate_until", sent), disable_tqdm=True)

    assert found == expected


def test_a_multiple_choice_task(own: HFLM, served: LocalCompletionsAPI, tmp_path: Path):
    questions = [
        {
            "question": "If the file does not exist,",
            "choices": [" an error is raised.", " banana banana."],
            "answer": 0,
        },
        {"question": "import", "choices": [" and and", " os"], "answer": 1},
        {"question": "Return the", "choices": [" number of items", " )))) ((", " of of of"], "answer": 2},
        {"question": "raise", "choices": [" ValueError", " the the"], "answer": 0},
    ]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    task = tmp_path / "task.yaml"
    task.write_text(
        f"task: choices\ndataset_path: json\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {tmp_path}}}\n"
        "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\ndoc_to_target: answer\n"
        "target_delimiter: ''\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )

    def run(model: Any) -> tuple[dict[str, float], list[list[float]]]:
        manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
        report = simple_evaluate(model, tasks=["choices"], task_manager=manager, bootstrap_iters=0)
        samples = sorted(report["samples"]["choices"], key=lambda sample: sample["doc_id"])
        values = [float(value) for sample in samples for value, _ in sample["filtered_resps"]]
        return {name: report["results"]["choices"][f"{name},none"] for name in ("acc", "acc_norm")}, values

    (expected, expected_values), (found, found_values) = run(own), run(served)

    assert found == expected
    assert found["acc"] == 0.75  # one answer is wrong on purpose, so that a constant fails
    assert found_values == pytest.approx(expected_values, abs=1e-4)
