"""Spoil written turns, and check what must hold of any answer: its stream is the whole, and entries are aligned."""

import random
from collections.abc import Callable, Iterator

from scorepool.engine import ChatCodec
from survey.calls.generated import SPLIT, Turn, turns
from survey.calls.read_back import codec_of, difference, written
from survey.calls.writers import WRITERS
from tests.answered_chat import Run
from tests.chat_formats import SAMPLES

_SPOILING = ("cut", "lose", "swap", "mix", "reason", "repeat", "insert")
_MOST_INSERTED = 80  # characters


def spoiled_turns(name: str, num: int, seed: int) -> Iterator[tuple[Turn, list[int], ChatCodec]]:
    """Yield turns of a format with the tokens of an answer that a broken model might write."""
    writer = WRITERS[name]
    sample, codec, rng = SAMPLES[writer.sample], codec_of(name), random.Random(f"{name} {seed}")  # noqa: S311
    for turn in turns(seed, num):
        text, calls = (each.replace(SPLIT, "") for each in (written(turn, writer, sample), writer.calls(turn.calls)))

        def encode(text: str) -> list[int]:
            return codec.tokenizer.encode(text, add_bos=False)[0]

        other = _of_another_format(rng)
        ids, at = encode(text), rng.randrange(max(1, len(text) // 8))
        match rng.choice(_SPOILING):
            case "cut":
                ids = ids[: 1 + rng.randrange(len(ids))]
            case "lose":
                ids = [token_id for token_id in ids if rng.random() > 0.03] or ids
            case "swap":
                rng.shuffle(ids)
            case "mix":
                ids = encode(other + text)
            case "reason":
                ids = encode(sample.reasoning[0] + calls + sample.reasoning[1] + text)
            case "repeat":
                ids = encode(calls + calls[: len(calls) // 2] + text)
            case _:
                ids = ids[:at] + encode(other[: rng.randrange(_MOST_INSERTED)]) + ids[at:]
        yield turn, ids, codec


def _of_another_format(rng: random.Random) -> str:
    writer = WRITERS[rng.choice(sorted(WRITERS))]
    (turn,) = turns(rng.randrange(1000), 1)
    return writer.calls(turn.calls).replace(SPLIT, "")


def check(name: str, num: int, seed: int, report: Callable[[str], None]) -> int:
    """Read spoiled turns, and return how many were streamed differently or had entries that are not aligned."""
    wrong = 0
    for turn, ids, codec in spoiled_turns(name, num, seed):
        answered = Run(codec, ids, steps=[1, 5, 2, 12, 3], tools=turn.tools)
        if found := difference(answered, ids):
            wrong += 1
            report(f"{found}: {codec.tokenizer.decode(ids)!r}")
    return wrong
