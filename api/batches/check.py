"""Whether an input file can be run. Every line's frame is read, and its model looked for; its body, when it is run."""

from msgspec import Struct

from scorepool import wire
from scorepool.api.batches.batch_lease import BatchLease
from scorepool.api.dialects.openai.batch import MAX_LINES, Batch, BatchError, Line, LineModel
from scorepool.api.state import State

MAX_ERRORS = 100  # told of


class Checked(Struct):
    num_lines: int
    model: str | None  # where all name the same
    errors: list[BatchError]


async def check(parts: State, turn: BatchLease) -> Checked:
    """Reads the whole file in one turn and writes nothing, so whoever is cut off begins again."""
    errors: list[BatchError] = []
    custom_ids: set[str] = set()
    models: dict[str, int] = {}  # by name: the first line with it
    number = num_lines = 0
    async for part in parts.files.parts(turn.batch.input_file_id):
        for text in lines_of(part):
            number += 1
            if not text:
                continue
            num_lines += 1
            error = _look(text, number, turn.batch, custom_ids, models)
            if error is not None and len(errors) < MAX_ERRORS:
                errors.append(error)
        if num_lines > MAX_LINES:
            message = f"expected at most {MAX_LINES} lines, found more"
            return Checked(num_lines, None, [BatchError(code="too_many_lines", message=message)])
        await turn.extend()
    if num_lines == 0:
        errors.append(BatchError(code="empty_file", message="the input file has no line"))
    served = await parts.models.serving(models)
    for model, number in models.items():
        if not served[model]:
            message = f"no live worker serves {model!r}"
            errors.append(BatchError(code="model_not_found", message=message, line=number, param="body.model"))
    return Checked(num_lines, next(iter(models)) if len(models) == 1 else None, errors[:MAX_ERRORS])


def lines_of(part: bytes) -> list[bytes]:
    """Blank ones are empty: they count in line numbers, and nowhere else."""
    lines = [line.strip() for line in part.split(b"\n")]
    return lines[:-1] if not lines[-1] else lines


def _look(text: bytes, number: int, batch: Batch, custom_ids: set[str], models: dict[str, int]) -> BatchError | None:
    try:
        line = wire.parse(text, Line)
    except wire.Invalid as error:
        code = "invalid_json_line" if error.field is None else "invalid_line"
        return BatchError(code=code, message=error.message, line=number, param=error.field)
    if line.custom_id in custom_ids:
        message = f"custom_id: {line.custom_id[:80]!r} stands in an earlier line, too"
        return BatchError(code="duplicate_custom_id", message=message, line=number, param="custom_id")
    custom_ids.add(line.custom_id)
    if line.url != batch.endpoint:
        message = f"url: expected {batch.endpoint}, the batch's endpoint, found {line.url}"
        return BatchError(code="mismatched_url", message=message, line=number, param="url")
    try:
        models.setdefault(wire.parse(bytes(line.body), LineModel).model, number)
    except wire.Invalid as error:
        field = f"body.{error.field}" if error.field else "body"
        return BatchError(code="invalid_line", message=f"body: {error.message}", line=number, param=field)
    return None
