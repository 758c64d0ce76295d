"""A tiny model that generates a script: after each token the one that follows it in the script.

Attention and MLP add nothing, the embedding of each token is its own unit vector, and the head maps it to the next
token, so a token is followed by one other at most, in all scripts. If the next token is not allowed, the others are
equally likely.
"""

from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<|im_end|>"
REASONING = ["Where is it?", " I look."]
CONTENT = ["One moment ", "Ã", "¤"]  # the two bytes of an ä
CALL = ['{"name": "look", ', '"arguments": {"place": "Zürich"}}']
SCRIPT = ["<think>", *REASONING, "</think>", *CONTENT, "<tool_call>", *CALL, "</tool_call>", EOS]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nCall them as <tool_call> says: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for tool_call in message.tool_calls %}<tool_call>{{ tool_call.function.name }}"
    "{% for key, value in tool_call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if reasoning_effort is defined %}Effort: {{ reasoning_effort }}\n{% endif %}<think>"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}{# tool_call.name #}"
)
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CONTEXT_LENGTH = 1024
_NOTHING = 1e-30  # the engine refuses a matrix of zeros
_CERTAIN = 5.0  # times sqrt(width): the logit of the next token; all others are 0


def build(folder: Path, *scripts: list[str], template: str = TEMPLATE, context_length: int = CONTEXT_LENGTH) -> None:
    """Save the model and its tokenizer.

    A script begins with the last token of a prompt. A single byte is written in the byte-level alphabet.
    """
    tokenizer = _tokenizer([piece for script in scripts for piece in script], template)
    pairs = [pair for script in scripts for pair in pairwise(tokenizer.convert_tokens_to_ids(script))]
    assert len({token_id for token_id, _ in pairs}) == len(pairs)
    width = (len(tokenizer) + 31) // 32 * 32
    config = LlamaConfig(
        vocab_size=width,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=context_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.fill_(_NOTHING)
        model.model.layers[0].mlp.down_proj.weight.fill_(_NOTHING)
        model.model.embed_tokens.weight.copy_(torch.eye(width))
        model.lm_head.weight.zero_()
        for token_id, following in pairs:
            model.lm_head.weight[following, token_id] = _CERTAIN
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(pieces: list[str], template: str) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [piece for piece in pieces if piece not in {*alphabet, *MARKERS, EOS}]
    backend = Backend(models.BPE({piece: token_id for token_id, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(piece, special=False) for piece in [*MARKERS, *words]])
    backend.add_tokens([AddedToken(piece, special=True) for piece in ["<|im_start|>", EOS]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS)
    tokenizer.chat_template = template
    return tokenizer
