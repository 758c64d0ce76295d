"""Read written turns back through the code of worker and API, streamed and not, and count what went wrong."""

import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scorepool.api.dialects.openai.chat_reply import TokenLogprob
from scorepool.engine import ChatCodec
from scorepool.engine.model.checkpoint import load_chat_codec
from survey.calls.generated import SPLIT, Turn, turns, without_split
from survey.calls.writers import WRITERS, Writer
from tests.answered_chat import Run, joined
from tests.chat_formats import EOS, SAMPLES, FormatSample, save_tokenizer

NUM_TRAINING_TURNS = 40  # from which a format's tokenizer learns its tokens
_TRAINING_SEED = 10**6
_MARKUP = re.compile(r"</?\|?\w[\w:▁｜|]*>|<｜[^｜]+｜>|\[/?[A-Z_]+\]")


@dataclass
class Findings:
    """What was found in the turns of one format. All counts but the first three should be 0."""

    turns: int = 0
    calls: int = 0
    tokens: int = 0
    misread: int = 0  # turns whose calls differ from those that were written
    mixed: int = 0  # turns whose content or reasoning differ
    leaked: int = 0  # markers in content or reasoning that were not written there
    streamed_differently: int = 0  # turns whose joined chunks differ from the whole answer
    misaligned: int = 0  # turns whose entries do not join to the text, token by token
    examples: list[str] = field(default_factory=list)  # of the first turns that are not right

    @property
    def wrong(self) -> int:
        return self.misread + self.mixed + self.leaked + self.streamed_differently + self.misaligned


def read_back(name: str, num: int, seed: int) -> Findings:
    """Write and read `num` turns of a format."""
    writer = WRITERS[name]
    sample, found = SAMPLES[writer.sample], Findings()
    codec = codec_of(name)
    rng = random.Random(seed)  # noqa: S311
    for turn in turns(seed, num, writer.cannot_write):
        _read_one(turn, writer, sample, codec, rng, found)
    return found


def codec_of(name: str) -> ChatCodec:
    """Return the codec of a format whose tokenizer learned its tokens from turns of the format."""
    writer = WRITERS[name]
    sample = SAMPLES[writer.sample]
    training = [written(turn, writer, sample) for turn in turns(_TRAINING_SEED, NUM_TRAINING_TURNS)]
    return _codec(sample, [text.replace(SPLIT, "") for text in training], writer.is_text)


def difference(answered: Run, token_ids: list[int]) -> str | None:
    """Say what is wrong with an answer, whatever it means. The answer may have ended before its last token."""
    if _streamed(answered) != _whole(answered):
        return "streamed differently"
    return None if _is_aligned(answered, token_ids[: len(_entries(answered))]) else "misaligned"


def written(turn: Turn, writer: Writer, sample: FormatSample) -> str:
    """Return the answer as the template of the format writes it, with its end."""
    reasoning = f"{sample.reasoning[0]}\n{turn.reasoning}\n{sample.reasoning[1]}" if _reasons(turn, sample) else ""
    content = sample.content[0] + turn.content + sample.content[1] if _speaks(turn, writer) else ""
    return f"{reasoning}{content}{writer.calls(turn.calls)}{EOS}".removeprefix(sample.opened)


def _reasons(turn: Turn, sample: FormatSample) -> bool:
    return bool(turn.reasoning and sample.reasoning[1])


def _speaks(turn: Turn, writer: Writer) -> bool:
    return bool(turn.content) and not writer.is_opened


def _codec(sample: FormatSample, training: list[str], repairs: bool) -> ChatCodec:
    with TemporaryDirectory() as folder:
        save_tokenizer(sample, sample.template_hint, Path(folder), training)
        return load_chat_codec(Path(folder), {}, tool_repair=repairs)


def _read_one(
    turn: Turn, writer: Writer, sample: FormatSample, codec: ChatCodec, rng: random.Random, found: Findings
) -> None:
    text = written(turn, writer, sample)
    token_ids = [token_id for piece in text.split(SPLIT) for token_id in codec.tokenizer.encode(piece, False)[0]]
    steps = [rng.randint(1, 12) for _ in range(5)]
    answered = Run(codec, token_ids, steps=steps, tools=turn.tools)
    message = answered.whole.message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    content, reasoning = (message.content or "").strip(), (message.reasoning_content or "").strip()
    expected = (
        without_split(turn.content) if _speaks(turn, writer) else "",
        without_split(turn.reasoning) if _reasons(turn, sample) else "",
    )
    wrong = {
        "misread": calls != _expected_calls(turn, writer),
        "mixed": (content, reasoning) != expected,
        "leaked": _markup(content + reasoning) - _markup("".join(expected)) != Counter(),
        "streamed_differently": _streamed(answered) != _whole(answered),
        "misaligned": not _is_aligned(answered, token_ids),
    }
    found.turns, found.calls, found.tokens = (
        found.turns + 1,
        found.calls + len(turn.calls[:1] if writer.is_one else turn.calls),
        found.tokens + len(token_ids),
    )
    for name, is_wrong in wrong.items():
        setattr(found, name, getattr(found, name) + is_wrong)
    if any(wrong.values()) and len(found.examples) < 3:
        found.examples.append(f"{[name for name in wrong if wrong[name]]}: {text!r}\n  read as {calls!r} {content!r}")


def _expected_calls(turn: Turn, writer: Writer) -> list[tuple[str, Any]]:
    """Return the calls that should be read: those that are written as text once each."""
    given = turn.calls[:1] if writer.is_one else turn.calls
    calls = [(name, without_split(arguments)) for name, arguments in given]
    return [call for index, call in enumerate(calls) if not writer.is_text or call not in calls[:index]]


def _markup(text: str) -> Counter[str]:
    return Counter(_MARKUP.findall(text))


def _whole(answered: Run) -> tuple[Any, ...]:
    whole = answered.whole
    message = whole.message
    calls = [(call.id, call.function) for call in message.tool_calls or ()]
    return (message.content or "", message.reasoning_content or "", calls, _entries(answered), whole.finish_reason)


def _entries(answered: Run) -> list[TokenLogprob]:
    logprobs = answered.whole.logprobs
    return [] if logprobs is None else logprobs.content


def _streamed(answered: Run) -> tuple[Any, ...]:
    content, reasoning, calls, entries, finish_reason = joined(answered.chunks(answered.deltas))
    return content, reasoning, [(call.id, call.function) for call in calls], entries, finish_reason


def _is_aligned(answered: Run, token_ids: list[int]) -> bool:
    """True if each token has its entry, in order, with its own logprob (see Run), and they join to the texts.

    Entries of markup have no bytes.
    """
    message, entries = answered.whole.message, _entries(answered)
    token_bytes, joined_bytes = answered.codec.tokenizer.token_bytes, dict.fromkeys(("content", "reasoning"), b"")
    for number, (entry, token_id) in enumerate(zip(entries, token_ids, strict=True)):
        expected = b"" if entry.channel == "markup" else token_bytes(token_id)
        if bytes(entry.bytes) != expected or entry.logprob != -number:
            return False
        if entry.channel in joined_bytes:
            joined_bytes[entry.channel] += expected
    texts = {"content": message.content or "", "reasoning": message.reasoning_content or ""}
    return texts == {channel: text.decode(errors="replace") for channel, text in joined_bytes.items()}
