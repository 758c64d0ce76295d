"""The model `scorepool` of lm-evaluation-harness agrees with the harness's HF model on the same weights."""

import json
import re
import runpy
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scorepool import Client, MixedResults
from scorepool.local.stack import Stack
from tests.engine.adapters import oracle_with, save_adapter

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from its imports
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from scorepool.integrations.lm_eval import ScorepoolLM
    from scorepool.integrations.lm_eval.arguments import ArgumentError

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

WINDOW = 60  # tokens
PAIRS = [
    ("If the file does not exist,", " an error is raised."),
    ("If the file does not exist,", " the"),
    ("If the file does not exist, ", "the"),  # the space belongs to the continuation
    ("import\n", "os\nimport sys\n"),
    ("If it is specified,", "\nthe number"),  # a token of `demo` spans the boundary
    ("", "Return a list of the names of the entries."),
    ("<bos>def __init__(self", "):\n    pass"),
    ("The value of ", "x is é and 🙂."),
    ("words of a long context " * 40, "and the end"),  # truncated from the left
]
TEXTS = ["Return the number of items.", "x = '🙂 é'\n", "import os\n" * 100, ""]
PROMPTS = ["If the file does not exist,", "import", "def __init__(self", "a context " * 60]


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=args, idx=index) for index, args in enumerate(arguments)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("demo", True), id="demo, the server's tokenizer"),
        pytest.param(("llama", False), id="llama, a tokenizer here"),
        pytest.param(("demo", False), id="demo, a tokenizer here", marks=pytest.mark.soak),
        pytest.param(("llama", True), id="llama, the server's tokenizer", marks=pytest.mark.soak),
    ],
)
def variant(request: pytest.FixtureRequest) -> tuple[str, bool]:
    """Return the model's name, and True if the server's tokenizer encodes."""
    return request.param


@pytest.fixture(scope="module")
def name(variant: tuple[str, bool]) -> str:
    return variant[0]


@pytest.fixture(scope="module")
def own(name: str, folders: dict[str, Path]) -> HFLM:
    return HFLM(pretrained=str(folders[name]), device="cpu", dtype="float32", batch_size=1, max_length=WINDOW)


@pytest.fixture(scope="module")
def served(variant: tuple[str, bool], stack: Stack, folders: dict[str, Path]) -> ScorepoolLM:
    name, is_remote = variant
    tokenizer = None if is_remote else str(folders[name])
    return ScorepoolLM(model=name, base_url=stack.url, tokenizer=tokenizer, max_length=WINDOW)


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


@pytest.mark.parametrize("is_open", [False, True])
def test_chat_templates(own: HFLM, served: ScorepoolLM, is_open: bool):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    chat += [{"role": "assistant", "content": "import"}] * is_open

    found = served.apply_chat_template(chat, add_generation_prompt=not is_open)

    assert found == own.apply_chat_template(chat, add_generation_prompt=not is_open)
    assert served.tok_encode(found) == own.tok_encode(found)
    assert served.chat_template(True) == own.chat_template(True)


def test_a_task_of_the_harness(stack: Stack, tmp_path: Path):
    questions = [
        {"question": "If the file does not exist,", "choices": [" banana.", " an error is raised."], "answer": 1},
        {"question": "import", "choices": [" and and", " os"], "answer": 1},
        {"question": "raise", "choices": [" the the", " ValueError"], "answer": 0},  # wrong, so that a constant fails
    ]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    (tmp_path / "task.yaml").write_text(
        f"task: choices\ndataset_path: json\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {tmp_path}}}\n"
        "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\ndoc_to_target: answer\n"
        "target_delimiter: ''\nmetric_list: [{metric: acc}]\n"
    )
    began = time.time()
    report = simple_evaluate(
        "scorepool",
        model_args=f"model=demo,base_url={stack.url}",
        tasks=["choices"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        batch_size=1,
        bootstrap_iters=0,
        use_cache=str(tmp_path / "cache"),
    )

    assert report["results"]["choices"]["acc,none"] == pytest.approx(2 / 3)
    assert report["config"]["model_dtype"] == "float32"
    with Client(stack.url) as client:
        assert [job.created_at for job in client.jobs().jobs if job.created_at > began] == []  # they are deleted


def test_the_example(stack: Stack, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["", stack.url])
    runpy.run_path(str(root / "examples" / "lm_eval_task.py"))
    assert "acc 1.0\nweights " in capsys.readouterr().out


def test_a_model_that_nobody_serves(stack: Stack):
    with pytest.raises(ValueError, match=f"model=gpt-4: {stack.url} serves demo, llama"):
        ScorepoolLM(model="gpt-4", base_url=stack.url)


def test_the_command_says_in_a_sentence_what_is_wrong(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "task.yaml").write_text(
        f"task: rolling\ndataset_path: json\ndataset_kwargs: {{data_files: {tmp_path}/rows.jsonl}}\ntest_split: train\n"
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\n"
        "metric_list: [{metric: bits_per_byte}]\n"
    )
    arguments = ["--model", "scorepool", "--tasks", "rolling", "--include_path", str(tmp_path)]
    model = f"model=gpt-4,base_url={stack.url}"
    monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments, "--model_args", model])
    with pytest.raises(SystemExit, match=f"^scorepool: model=gpt-4: {stack.url} serves demo, llama"):
        runpy.run_module("scorepool.integrations.lm_eval", run_name="__main__")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "generation arguments num_beams: expected frequency_penalty, "),
        ({"max_gen_toks": WINDOW}, f"max_gen_toks is {WINDOW}: expected less than max_length, {WINDOW}"),
    ],
)
def test_generation_arguments_that_no_job_has(served: ScorepoolLM, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        served.generate_until(instances("generate_until", [("import", options)]), disable_tqdm=True)


@pytest.mark.parametrize("continuation", ["", "word " * 1000])
def test_a_continuation_that_cannot_be_scored(served: ScorepoolLM, continuation: str):
    with pytest.raises(ValueError, match=f"tokens after the context .*: expected 1 to max_length, {WINDOW}"):
        served.loglikelihood(instances("loglikelihood", [("import", continuation)]), disable_tqdm=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "model_args: expected model=NAME"),
        ({"model": "demo", "pretrained": "demo"}, "model_args pretrained: expected model, base_url, "),
        ({"model": "demo", "retry_s": "abc"}, "retry_s=abc: expected a number from 0 on"),
        ({"model": "demo", "max_length": 99999}, "max_length=99999: expected 1 to 2047"),
        ({"model": "demo", "max_length": 0}, "max_length=0: expected 1 to 2047"),
        ({"model": "demo", "tokenizer": "/no/such"}, "tokenizer=/no/such: expected a folder or an id of the hub; "),
        ({"model": "demo", "add_bos_token": True}, "add_bos_token=True needs tokenizer="),
    ],
)
def test_a_wrong_argument_is_named(stack: Stack, arguments: dict[str, Any], message: str):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        ScorepoolLM(**{"base_url": stack.url} | arguments)


def test_another_tokenizer_is_refused(stack: Stack, folders: dict[str, Path]):
    """It would give other numbers, and no error."""
    with pytest.raises(ArgumentError, match=f"tokenizer={folders['llama']}: it is not that of demo on the server"):
        ScorepoolLM(model="demo", base_url=stack.url, tokenizer=str(folders["llama"]))


def test_contexts_that_lose_their_beginning_are_counted(served: ScorepoolLM, caplog: pytest.LogCaptureFixture):
    served.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    [loglikelihood] = caplog.messages
    assert loglikelihood.startswith(f"1 of {len(PAIRS)} requests have more tokens than fit (max_length), up to ")
    caplog.clear()
    served.generate_until(instances("generate_until", [(PROMPTS[0], {"max_gen_toks": 4})]), disable_tqdm=True)
    assert caplog.messages == []


def test_another_model_under_the_name_ends_the_evaluation(served: ScorepoolLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(served, "stamp", msgspec.structs.replace(served.stamp, fingerprint="0" * 64))
    with pytest.raises(MixedResults, match="has changed since the evaluation began: fingerprint '0000"):
        served.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)


def test_an_adapter(stack: Stack, folders: dict[str, Path], tmp_path: Path):
    base, adapter = folders["llama"], save_adapter(folders["llama"], tmp_path, 0)
    with Client(stack.url) as client:
        client.load_adapter("sql", str(adapter), model="llama")
        try:
            served = ScorepoolLM(model="sql", base_url=stack.url, max_length=WINDOW)
            [(found, _)] = served.loglikelihood(instances("loglikelihood", PAIRS[:1]), disable_tqdm=True)
            ids, start = served.tok_encode("".join(PAIRS[0])), len(served.tok_encode(PAIRS[0][0]))
        finally:
            client.unload_adapter("sql", model="llama")

    rows = oracle_with(base, adapter).logprobs(ids)
    assert found == pytest.approx(sum(float(rows[place - 1, ids[place]]) for place in range(start, len(ids))), abs=1e-4)
    assert served.get_model_info()["model_adapter"].startswith("sql@")
