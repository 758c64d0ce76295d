"""Tokenizers of a served model."""

from collections.abc import Sequence
from typing import Any, Protocol

from tqdm import tqdm
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from scorepool import wire
from scorepool.integrations.lm_eval.arguments import ArgumentError
from scorepool.integrations.lm_eval.jobs import run
from scorepool.options import JobOptions
from scorepool.sdk import Client

PROBE = (  # texts that two tokenizers rarely encode alike
    "The value of x is 3.14159; été, naïve, Größe, 数値, صفر, Привет, 🙂.\n\n"
    "    def __init__(self, name='a', *args):\n\treturn os.path.join(name, \"b\")  # see https://example.org/?q=1&r=20\n"
    "Internationalisation, antidisestablishmentarianism and 1234567890 unbelievable circumstances happened.  \n"
)
SHOWN_FROM = 100  # texts: fewer are encoded before one could read a progress bar


class Tokenizer(Protocol):
    """What ScorepoolLM needs of a tokenizer. lm_eval reads `chat_template`."""

    name: str
    bos_token_id: int | None
    eos_token_id: int | None
    chat_template: str | dict[str, str] | None

    def token(self, token_id: int) -> str:
        """Return the text of a token."""

    def encode(self, texts: Sequence[str], add_bos: Sequence[bool]) -> list[list[int]]:
        """Return the token ids of each text, with the tokenizer's BOS before it where `add_bos` says so."""

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""

    def decode(self, generated: wire.SequenceResult) -> str:
        """Return a generated text without special tokens."""

    def render(self, messages: list[dict[str, str]], **options: Any) -> str:
        """Return the prompt of a chat. Raises jinja2.TemplateError."""


class LocalTokenizer:
    """A tokenizer that transformers loads, from a folder or the hub."""

    def __init__(self, name: str, **options: Any) -> None:
        """Raises ArgumentError if it cannot be loaded."""
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ArgumentError(f"tokenizer={name}: expected a folder or an id of the hub; {reason}") from error
        self.name = name
        self.bos_token_id: int | None = self._tokenizer.bos_token_id
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        self.chat_template: str | dict[str, str] | None = self._tokenizer.chat_template

    def token(self, token_id: int) -> str:
        return str(self._tokenizer.decode(token_id))

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))

    def encode(self, texts: Sequence[str], add_bos: Sequence[bool]) -> list[list[int]]:
        return [
            list(self._tokenizer.encode(text, add_special_tokens=add)) for text, add in zip(texts, add_bos, strict=True)
        ]

    def decode(self, generated: wire.SequenceResult) -> str:
        """Decode as the HF model does: some tokenizers strip the first space of a text."""
        return str(self._tokenizer.decode(generated.token_ids, skip_special_tokens=True))

    def render(self, messages: list[dict[str, str]], **options: Any) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))


class ServerTokenizer:
    """The tokenizer of a model's worker, used by jobs. Nothing is loaded here.

    A text costs about a millisecond, so each one is encoded once.
    """

    def __init__(self, client: Client, model: str, options: JobOptions, max_in_flight: int) -> None:
        """Raises ScorepoolError, Unreachable."""
        self._client, self._options, self._max_in_flight = client, options, max_in_flight
        self.name = model
        self._info = client.tokenizer_info(model)
        self.chat_template: str | dict[str, str] | None = self._info.chat_template
        self._texts: dict[int, str] = {}  # of special tokens
        self.bos_token_id, self.eos_token_id = self._find(self._info.bos_token), self._find(self._info.eos_token)

    def _find(self, token: str | None) -> int | None:
        if token is None:
            return None
        (token_id,) = self.encode([token], [False])[0]
        self._texts[token_id] = token
        return token_id

    def token(self, token_id: int) -> str:
        if token_id not in self._texts:
            self._texts[token_id] = self._client.detokenize(self.name, [token_id])
        return self._texts[token_id]

    def encode(self, texts: Sequence[str], add_bos: Sequence[bool]) -> list[list[int]]:
        asked = list(dict.fromkeys(zip(texts, add_bos, strict=True)))
        requests = (wire.Tokenize(model=self.name, prompt=text, add_bos=add, **self._options) for text, add in asked)
        bar = tqdm(total=len(asked), desc="Tokenizing on the server", disable=len(asked) < SHOWN_FROM)
        ids: dict[tuple[str, bool], list[int]] = {}
        with bar:
            results = run(self._client, requests, self._max_in_flight)
            for key, result in zip(asked, results, strict=True):
                ids[key] = result.sequences[0].token_ids
                bar.update()
        return [ids[key] for key in zip(texts, add_bos, strict=True)]

    def text(self, token_ids: Sequence[int]) -> str:
        return self._client.detokenize(self.name, list(token_ids))

    def decode(self, generated: wire.SequenceResult) -> str:
        return generated.text

    def render(self, messages: list[dict[str, str]], **options: Any) -> str:
        options |= {"bos_token": self._info.bos_token, "eos_token": self._info.eos_token}
        # Annotated as a string, it returns the texts and their masks.
        rendered: Any = render_jinja_template([messages], chat_template=self._info.chat_template, **options)
        return str(rendered[0][0])


def check_same(tokenizer: LocalTokenizer, served: ServerTokenizer) -> None:
    """Compare what both make of a text, because another tokenizer gives wrong numbers without an error.

    Raises ArgumentError.
    """
    [found], [expected] = (each.encode([PROBE], [False]) for each in (tokenizer, served))
    if found != expected:
        raise ArgumentError(
            f"tokenizer={tokenizer.name}: it is not that of {served.name} on the server, which encodes the same text "
            "otherwise: give the folder or the id that the worker loaded, or leave tokenizer= out"
        )
