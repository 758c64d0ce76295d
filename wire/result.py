"""Define outcomes: a job ends in a Result or in a Failure, never in anything else."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from scorepool.wire.columns import Floats, LogprobsMode, StreamedColumns
from scorepool.wire.compared import ModelComparison
from scorepool.wire.extras import import_for
from scorepool.wire.packed import PackedColumns, unpacked_columns
from scorepool.wire.provenance import Provenance, Usage

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from scorepool.wire.arrays import Array

SHOWN_CHARACTERS = 60  # of a text, in a repr
SHOWN_SEQUENCES = 3

FailureCode = Literal[
    "invalid",
    "too_long",
    "numeric",
    "timeout",
    "expired",
    "canceled",
    "crashed",
    "internal",
    "weights_gone",
    "not_stored",
]
FAILURE_CODES = (
    "`invalid`: the model cannot do what the request asks for; `field` names the place. "
    "`too_long`: more tokens than the model's context or the worker's budget allows. "
    "`numeric`: the model computed NaN. "
    "`timeout`: it ran longer than its `timeout_s`. "
    "`expired`: it did not end before its `expires_at`. "
    "`canceled`: its owner canceled it. "
    "`crashed`: its worker died too often while it ran. "
    "`internal`: a bug in scorepool. "
    "`weights_gone`: the version of the weights that it asks for does not serve any more. "
    "`not_stored`: its result is too large for Redis, and no result store took it."
)
Channel = Literal["content", "reasoning", "tool_call", "markup"]
CHANNELS = "`markup`: separators, special tokens and the token that ends the turn, which are in no other channel."


class Failure(Struct, tag="failure", frozen=True, kw_only=True, omit_defaults=True):
    """Report why a job has no result."""

    code: Annotated[FailureCode, Meta(description=FAILURE_CODES)]
    message: Annotated[str, Meta(description="A sentence that names the field, the value and what is expected.")]
    field: Annotated[str | None, Meta(description="The field of the request that is at fault.")] = None


class ToolCallResult(Struct, frozen=True, kw_only=True):
    """Report a function that the model called."""

    id: Annotated[str, Meta(description="The same tokens give the same id.")]
    name: str
    arguments: Annotated[str, Meta(description="A JSON object.")]
    entry: Annotated[int, Meta(description="Index of the generated token that ends the call.")]


class DraftLogprob(Struct, frozen=True, kw_only=True):
    """Report a token that speculation proposed, and that the model verified.

    It follows the generated tokens before it, or those that were proposed before it in the same step. Both logprobs are
    in nats; -9999.0 stands for -inf.
    """

    position: Annotated[int, Meta(description="Index of the generated token in whose place it was proposed.")]
    token_id: int
    draft_logprob: Annotated[
        float | None, Meta(description="Logprob under the draft model's own distribution; null: n-grams proposed it.")
    ]
    logprob: Annotated[float, Meta(description="Logprob under the model, in the mode of the other logprobs.")]
    accepted: Annotated[bool, Meta(description="True if it is the generated token.")]


class SequenceResult(StreamedColumns, frozen=True, kw_only=True, omit_defaults=True):
    """Report the tokens of one sequence. Every column has one entry per reported token, in the order of the text.

    Entry j belongs to `token_ids[j]`: logprobs[j] = log p(token_ids[j] | every token before it), in nats.
    Bytes are base64 in JSON. The joined `token_bytes`, without those of `skipped` tokens, are the bytes of `text`.
    If an end token ended the generation, `text` ends before it and the columns include it. If a stop string did, both
    end before it without `include_stop_str_in_output`, but a token within which it begins is in the columns.
    An absent field has its default.
    """

    text: str
    sampled_logprobs: Annotated[
        Floats | None, Meta(description="Logprobs under the distribution sampled from, if it is not the model's own.")
    ] = None
    recomputed_logprobs: Annotated[
        Floats | None, Meta(description="Logprobs of the generated tokens only, scored again as given tokens.")
    ] = None
    recompute_gap: Annotated[
        float | None, Meta(description="Largest difference between `recomputed_logprobs` and `logprobs`, in nats.")
    ] = None
    target_bytes: Annotated[
        list[bytes] | None, Meta(description="Bytes of the request's `targets`, in their order, if it asked for them.")
    ] = None
    draft_logprobs: Annotated[
        list[DraftLogprob] | None,
        Meta(description="One entry per proposed token, in their order, with `include_draft_logprobs`."),
    ] = None
    ranks: Annotated[list[int | None] | None, Meta(description="1 is the most likely token.")] = None
    entropies: Annotated[Floats | None, Meta(description="Entropy of each token's distribution, in nats.")] = None
    logprob_sum: Annotated[float | None, Meta(description="Sum over the completion's tokens.")] = None
    is_greedy: Annotated[
        bool | None,
        Meta(description="True if each completion token is the most likely. Needs `rank` or `top_logprobs`."),
    ] = None
    num_prompt_tokens: int = 0
    num_reported_prompt_tokens: Annotated[
        int, Meta(description="Number of leading entries that belong to the prompt.")
    ] = 0
    prompt_token_ids: Annotated[
        list[int] | None, Meta(description="The ids that were used, if the prompt was text.")
    ] = None
    bos_added: Annotated[bool, Meta(description="True if the worker began the prompt with BOS.")] = False
    clamped: Annotated[int, Meta(description="Number of logprobs that were -inf and are written as -9999.0.")] = 0
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: Annotated[
        int | str | None, Meta(description="The item of `stop_token_ids` or `stop`; null: the model's own end token.")
    ] = None
    skipped: Annotated[list[int], Meta(description="Indices of generated special tokens that `text` leaves out.")] = (
        field(default_factory=list)
    )
    channels: Annotated[
        list[Channel] | None, Meta(description=f"One entry per generated token of a chat. {CHANNELS}")
    ] = None
    tool_calls: list[ToolCallResult] = field(default_factory=list)
    truncated: Annotated[int, Meta(description="Number of tokens that `truncate` cut.")] = 0
    failure: Annotated[
        Failure | None, Meta(description="The reason why the item has no tokens here, with `on_item_error` `report`.")
    ] = None

    @property
    def num_reasoning_tokens(self) -> int:
        """The number of generated tokens in the channel `reasoning`; 0 if the model has none."""
        return (self.channels or []).count("reasoning")

    def __repr__(self) -> str:
        """Show the text's beginning and the numbers of the whole, never the columns."""
        cut = "..." if len(self.text) > SHOWN_CHARACTERS else ""
        if self.failure is not None:
            return f"<SequenceResult failure={self.failure.message!r}>"
        shown = [f"{self.text[:SHOWN_CHARACTERS] + cut!r}", f"{len(self.token_ids)} tokens"]
        if self.logprob_sum is not None:
            shown.append(f"logprob_sum={self.logprob_sum:.4f}")
        if self.is_greedy is not None:
            shown.append(f"is_greedy={self.is_greedy}")
        if self.finish_reason is not None:
            shown.append(f"finish_reason={self.finish_reason!r}")
        return f"<SequenceResult {', '.join(shown)}>"

    def numpy(self) -> "dict[str, Array]":
        """Return the numeric columns that the sequence has, by name. Needs numpy.

        Columns of tokens have the shape [tokens]: `token_ids` are int64, the others float32 with NaN for a missing
        value, also `ranks`. `top_ids`, `top_logprobs` and `target_logprobs` have the shape [tokens, most of a token],
        filled up with -1 and NaN. Raises ImportError.
        """
        columns: dict[str, Array] = import_for("numpy()", "scorepool.wire.arrays", "numpy").numpy_columns(self)
        return columns


def _default_mode() -> LogprobsMode:
    """Return the mode of results of older releases. As a factory, because a constant default would be left out."""
    return "raw_logprobs"


class Classification(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Report what a classifier says about one item. Logits and probabilities have the order of the result's labels."""

    label: Annotated[str, Meta(description="The label with the highest logit. Empty if the item failed.")]
    logits: Annotated[Floats, Meta(description="The output of the model's head. A reward model's reward.")]
    probs: Annotated[
        Floats | None,
        Meta(
            description="Softmax of the logits; sigmoid of each if there is one label, or if a text may have several; "
            "null for a regression."
        ),
    ]
    num_tokens: Annotated[int, Meta(description="Tokens of the item.")]
    truncated: Annotated[int, Meta(description="Number of tokens that `truncate` cut.")] = 0
    failure: Annotated[
        Failure | None, Meta(description="The reason why the item has no logits, with `on_item_error` `report`.")
    ] = None


class Embedding(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Report the embedding of one item."""

    values: Annotated[Floats, Meta(description="The numbers: the width of the model, or `dimensions`.")]
    num_tokens: Annotated[int, Meta(description="Tokens of the item.")]
    truncated: Annotated[int, Meta(description="Number of tokens that `truncate` cut.")] = 0


class Result(Struct, tag="result", frozen=True, kw_only=True, omit_defaults=True):
    """Report what a job computed."""

    sequences: Annotated[
        list[SequenceResult],
        Meta(
            description="One per item of a score job, `n` of a generate job, one of a tokenize job, none of a classify "
            "or embed job."
        ),
    ]
    labels: Annotated[list[str], Meta(description="Names of the classifier's labels. Only of a classify job.")] = field(
        default_factory=list
    )
    classifications: Annotated[list[Classification], Meta(description="One per item of a classify job.")] = field(
        default_factory=list
    )
    embeddings: Annotated[list[Embedding], Meta(description="One per item of an embed job.")] = field(
        default_factory=list
    )
    comparison: Annotated[
        ModelComparison | None, Meta(description="The difference from the base. Only of a compare job.")
    ] = None
    packed: Annotated[
        PackedColumns | None,
        Meta(description="The columns of all sequences, if the request said `packed`. `sequences` then have none."),
    ] = None
    temperature: Annotated[
        float,
        Meta(description="The request's. Processed logprobs, and `sampled_logprobs`, are those at this temperature."),
    ]
    logprobs_mode: Annotated[
        LogprobsMode,
        Meta(description="The mode of the logprobs: of a score job processed_logprobs if its `temperature` is not 1."),
    ] = field(default_factory=_default_mode)
    usage: Usage
    stamp: Provenance

    def __repr__(self) -> str:
        """Show the model, the size and the first sequences."""
        shown = "".join(f"\n  {sequence!r}" for sequence in self.sequences[:SHOWN_SEQUENCES])
        more = len(self.sequences) - SHOWN_SEQUENCES
        rest = f"\n  ... {more} more" if more > 0 else ""
        if self.classifications:
            shown = "".join(f"\n  {one.label} {list(one.logits)}" for one in self.classifications[:SHOWN_SEQUENCES])
            return f"<Result of {self.stamp.model}: {len(self.classifications)} classified{shown}>"
        if self.embeddings:
            return f"<Result of {self.stamp.model}: {len(self.embeddings)} embedded>"
        count = f"{len(self.sequences)} sequence{'' if len(self.sequences) == 1 else 's'}"
        return f"<Result of {self.stamp.model}: {count}{shown}{rest}>"

    @property
    def num_tokens(self) -> int:
        """The number of reported tokens of all sequences."""
        return sum(self.packed.lengths if self.packed else (len(sequence.token_ids) for sequence in self.sequences))

    def unpacked(self) -> "Result":
        """Return the result with its columns in `sequences`. Tokens of a packed result have no text and no bytes."""
        if self.packed is None:
            return self
        pairs = zip(self.sequences, unpacked_columns(self.packed), strict=True)
        return replace(self, sequences=[_with_columns(sequence, columns) for sequence, columns in pairs], packed=None)

    def arrays(self) -> "dict[str, Array]":
        """Return the columns of all sequences as arrays [rows, tokens] or [rows, tokens, K], by name. Needs numpy.

        `lengths` has the reported tokens of each row. Rows are filled up at their end, and columns that only some
        sequences have in the rows of the others, with NaN, ids with -1 and ranks with 0. Ids and ranks are int32, the
        others float32. Of a packed result whose rows have one length they are its own memory, without a copy; torch
        reads them with `from_numpy` or `from_dlpack`. Raises ImportError.
        """
        arrays: dict[str, Array] = import_for("arrays()", "scorepool.wire.arrays", "numpy").result_arrays(
            self.packed, self.sequences
        )
        return arrays

    def to_arrow(self) -> "pyarrow.Table":
        """Return a table with one row per sequence and a column per field of SequenceResult. Needs pyarrow.

        Of a classify job it has one row per item and a column per field of Classification.

        Every result has the same columns and types, so that tables can be joined and written to one file. Missing
        values are null, also those in lists. `stop_reason` is text: a token's id is written in digits. Raises
        ImportError.
        """
        tables = import_for("to_arrow()", "scorepool.wire.tables", "pyarrow")
        return (
            tables.label_table(self.classifications)
            if self.classifications
            else tables.arrow_table(self.unpacked().sequences)
        )

    def to_pandas(self) -> "pandas.DataFrame":
        """Return `to_arrow()` as a data frame without the columns that are null in every row. Needs pandas.

        Raises ImportError.
        """
        import_for("to_pandas()", "pandas", "pandas", "pyarrow")
        table = self.to_arrow()
        return table.select([name for name in table.column_names if table[name].null_count < len(table)]).to_pandas()


Outcome = Result | Failure


def _with_columns(sequence: SequenceResult, columns: dict[str, Any]) -> SequenceResult:
    """Return a sequence with its columns, of which `sampled_logprobs` has generated tokens only."""
    if (sampled := columns.get("sampled_logprobs")) is not None:
        columns = {**columns, "sampled_logprobs": Floats(sampled[sequence.num_reported_prompt_tokens :])}
    return replace(sequence, **columns)


def map_failures(result: Result, rename: Callable[[Failure], Failure]) -> Result:
    """Return a result with the failures of its items as `rename` returns them."""
    sequences, classifications = result.sequences, result.classifications
    return replace(
        result,
        sequences=[replace(each, failure=rename(each.failure)) if each.failure else each for each in sequences],
        classifications=[
            replace(each, failure=rename(each.failure)) if each.failure else each for each in classifications
        ],
    )
