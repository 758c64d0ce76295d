"""The model `scorepool` of lm-evaluation-harness agrees with the harness's HF model on the same weights."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from scorepool.local.stack import Stack

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from its imports
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from scorepool.integrations.lm_eval import ScorepoolLM

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

WINDOW = 60  # tokens
PAIRS = [
    ("If the file does not exist,", " an error is raised."),
    ("If the file does not exist,", " the"),
    ("If the file does not exist, ", "the"),  # the space belongs to the continuation
    ("import\n", "os\nimport sys\n"),
    ("", "Return a list of the names of the entries."),
    ("<bos>def __init__(self", "):\n    pass"),
    ("The value of ", "x is é and 🙂."),
    ("words of a long context " * 40, "and the end"),  # truncated from the left
]
TEXTS = ["Return the number of items.", "x = '🙂 é'\n", "import os\n" * 100, ""]
PROMPTS = ["If the file does not exist,", "import", "def __init__(self", "a context " * 60]


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=args, idx=index) for index, args in enumerate(arguments)]


@pytest.fixture(scope="module", params=["demo", "llama"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def own(name: str, folders: dict[str, Path]) -> HFLM:
    return HFLM(pretrained=str(folders[name]), device="cpu", dtype="float32", batch_size=1, max_length=WINDOW)


@pytest.fixture(scope="module")
def served(name: str, stack: Stack, folders: dict[str, Path]) -> ScorepoolLM:
    return ScorepoolLM(model=name, base_url=stack.url, tokenizer=str(folders[name]), max_length=WINDOW)


def test_loglikelihood(own: HFLM, served: ScorepoolLM):
    expected = own.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)

    found = served.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)

    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)


def test_loglikelihood_rolling(own: HFLM, served: ScorepoolLM):
    arguments = [(text,) for text in TEXTS]
    expected = own.loglikelihood_rolling(instances("loglikelihood_rolling", arguments), disable_tqdm=True)

    found = served.loglikelihood_rolling(instances("loglikelihood_rolling", arguments), disable_tqdm=True)

    assert found == pytest.approx(expected, rel=1e-5, abs=1e-4)


def test_generate_until(own: HFLM, served: ScorepoolLM):
    asked = {"until": ["\n", ".", "x" * 2000], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
    arguments = [(prompt, asked) for prompt in PROMPTS]
    expected = own.generate_until(instances("generate_until", arguments), disable_tqdm=True)

    found = served.generate_until(instances("generate_until", arguments), disable_tqdm=True)

    assert found == expected
