"""The demo model is small, loads in both libraries, has the stated perplexity and distinguishes text from noise."""

import json
import random
import re
from dataclasses import fields
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
import torch
from mlx_lm.models.qwen3 import ModelArgs
from transformers import AutoModelForCausalLM, AutoTokenizer

from scorepool.models import DEMO
from scorepool.models.card import perplexity, read_heldout
from scorepool.models.corpus import Document, chat, is_held_out, split
from scorepool.models.train import BATCH_TOKENS, batches

PASSAGES = read_heldout(DEMO)
PROSE = [passage for passage in PASSAGES if passage.kind == "prose"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@torch.no_grad()
def logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Compute the logprob of each token but the first: ids [length] -> [length - 1] float32."""
    rows = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def shuffled_words(text: str) -> str:
    """Shuffle the words, keeping spaces and lines."""
    pieces = re.split(r"(\s+)", text)
    words = pieces[::2]
    random.Random(0).shuffle(words)
    pieces[::2] = words
    return "".join(pieces)


def test_the_folder_is_at_most_4_mb():
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 4_000_000


def test_the_config_declares_what_mlx_lm_needs():
    config = json.loads((DEMO / "config.json").read_text())

    arguments = ModelArgs.from_dict(config)

    declared = {f.name for f in fields(ModelArgs)} & config.keys()
    assert all(getattr(arguments, name) == config[name] for name in declared)
    assert arguments.rope_theta == 10_000
    assert arguments.tie_word_embeddings
    assert arguments.max_position_embeddings >= 1024


def test_mlx_lm_and_transformers_compute_the_same_logits(tokenizer, model):
    ids = tokenizer.encode(PROSE[0].text)[:300]
    mlx_model, mlx_tokenizer = mlx_lm.load(str(DEMO))
    mlx_model.set_dtype(mx.float32)

    mlx_logits = torch.tensor(mlx_model(mx.array([ids]))[0].tolist())

    with torch.no_grad():
        torch_logits = model(input_ids=torch.tensor([ids])).logits[0]
    assert mlx_tokenizer.encode(PROSE[0].text)[:300] == ids
    assert torch.allclose(mlx_logits, torch_logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n        return x\t# tab\r\n\r\n",
        "naïve é and e\u0301 stay apart",
        "🙂 👩‍👩‍👧 漢字 ﷽",
        "\x00\x01\x7f\u2028\ufeff",
        "  two spaces before, three behind   ",
        "1234567890",
        "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
        "",
    ],
)
def test_text_survives_encoding_and_decoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_no_bos_is_added_and_every_end_token_is_declared(tokenizer):
    config = json.loads((DEMO / "config.json").read_text())
    generation = json.loads((DEMO / "generation_config.json").read_text())

    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("if") == tokenizer.encode("if", add_special_tokens=False)
    assert (
        config["eos_token_id"]
        == generation["eos_token_id"]
        == tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    )
    assert tokenizer.eos_token_id in config["eos_token_id"]
    assert len(tokenizer) == config["vocab_size"]


def test_the_chat_template_renders_each_turn_once(tokenizer):
    messages = [
        {"role": "user", "content": "What is os.path?"},
        {"role": "assistant", "content": "A module."},
    ]

    question = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    exchange = tokenizer.apply_chat_template(messages, tokenize=False)

    assert question == "<|im_start|>user\nWhat is os.path?<|im_end|>\n<|im_start|>assistant\n"
    assert exchange == chat("What is os.path?", "A module.")  # the format of the training data
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert ids == tokenizer.encode(exchange)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2


def test_the_shipped_passages_were_held_out():
    assert len(PASSAGES) >= 30
    assert all(is_held_out(passage.source) for passage in PASSAGES)


def test_training_excludes_paragraphs_of_held_out_sources():
    shared = "A paragraph that is long enough to be recognised wherever it occurs."
    quoting = Document("os.py", "code", f"# Before.\n\n#  {shared}\n\n# After.\n")
    held_out_document = Document("random.py", "prose", f"{shared}\n\nMore.\n")
    assert [is_held_out(document.source) for document in (quoting, held_out_document)] == [False, True]

    train, held_out = split([quoting, held_out_document])

    assert train == [Document("os.py", "code", "# Before.\n\n# After.\n")]
    assert held_out == [held_out_document]


def test_training_predicts_each_token_of_its_stream_at_most_once():
    tokens = torch.arange(100_000)

    seen = list(batches(tokens, random.Random(0)))

    assert all(batch[:, 1:].numel() == BATCH_TOKENS for batch in seen)
    assert all(torch.equal(batch[:, 1:], batch[:, :-1] + 1) for batch in seen)
    targets = torch.cat([batch[:, 1:].flatten() for batch in seen])
    assert len(targets.unique()) == len(targets) > 0.9 * len(tokens)


@pytest.mark.soak
def test_the_card_states_the_perplexity_of_the_weights():
    card = (DEMO / "README.md").read_text()
    stated = re.search(r"\| all \| ([\d.]+) \|", card)
    assert stated is not None

    assert perplexity(DEMO, PASSAGES) == pytest.approx(float(stated[1]), rel=0.02)


@pytest.mark.soak
def test_real_text_scores_1_5_nats_a_token_above_the_same_words_shuffled(tokenizer, model):
    real = [logprobs(model, tokenizer.encode(passage.text)) for passage in PROSE]
    shuffled = [logprobs(model, tokenizer.encode(shuffled_words(passage.text))) for passage in PROSE]

    assert torch.cat(real).mean() - torch.cat(shuffled).mean() >= 1.5
    assert all(one.mean() > other.mean() for one, other in zip(real, shuffled, strict=True))


@pytest.mark.soak
def test_the_true_continuation_ranks_above_continuations_of_other_texts(tokenizer, model):
    texts = [ids for passage in PROSE if len(ids := tokenizer.encode(passage.text)) >= 150]
    prompts, continuations = [ids[:120] for ids in texts], [ids[120:150] for ids in texts]

    first = 0
    for own, prompt in enumerate(prompts):
        others = [(own + step) % len(texts) for step in (1, 2, 3)]
        scores = [logprobs(model, prompt + continuations[i])[-30:].mean() for i in (own, *others)]
        first += scores[0] == max(scores)

    assert first >= 0.75 * len(texts)
