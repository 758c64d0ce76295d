"""The tokenizer of the tiny models, which tests of texts and chats use without a model."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MAX_TOKENS = 500  # fewer than the embeddings have rows, as in many checkpoints
BOS, EOS, PAD = 0, 1, 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_TRAINING_TEXT = [
    "the quick brown fox jumps over the lazy dog and then the dog sleeps in the sun",
    "a token is scored under the model, given the tokens before it; the numbers are right",
    "def add(first: int, second: int) -> int: return first + second",
]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE that adds <bos> before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_TOKENS,
        special_tokens=["<bos>", "<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        add_bos_token=True,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
