"""Validate an input file before its batch runs: every line's JSON, `custom_id`, `url` and model.

The rest of a line's body is parsed when the line starts.
"""

import codecs

from msgspec import Struct

from scorepool import wire
from scorepool.api.batches.batch_lease import BatchLease
from scorepool.api.batches.services import BatchServices
from scorepool.api.dialects.openai.batch import MAX_LINES, Line, LineModel
from scorepool.api.http import tasks
from scorepool.wire.batch import Batch, BatchError

MAX_ERRORS = 100  # in a batch's `errors`
BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class Validation(Struct):
    """Report what the validation found."""

    num_lines: int
    model: str | None  # if all lines name the same
    errors: list[BatchError]
    is_complete: bool = True  # False while a server does not answer that may have an adapter of a name


async def validate(services: BatchServices, lease: BatchLease) -> Validation:
    """Read the whole file under one lease and write nothing: after a crash the next driver begins again."""
    errors: list[BatchError] = []
    custom_ids: set[str] = set()
    models: dict[str, int] = {}  # by name: the first line that names it
    number = num_lines = 0
    async for chunk in services.files.chunks(lease.batch.input_file_id):
        async for text in tasks.in_turns(split_lines(chunk)):
            number += 1
            if number == 1 and text.startswith(BYTE_ORDER_MARKS):
                message = "the file begins with a byte order mark: save it as UTF-8 without one"
                return Validation(0, None, [BatchError(code="invalid_json_line", message=message, line=number)])
            if not text:
                continue
            num_lines += 1
            if num_lines > MAX_LINES:
                message = f"expected at most {MAX_LINES} lines, found more"
                return Validation(num_lines, None, [BatchError(code="too_many_lines", message=message)])
            error = _validate_line(text, number, lease.batch, custom_ids, models)
            if error is not None and len(errors) < MAX_ERRORS:
                errors.append(error)
        await lease.extend()
    if num_lines == 0:
        errors.append(BatchError(code="empty_file", message="the input file has no line"))
    # The model of a name that the map has is there as soon as its server is. An adapter's name is not in the map.
    unreachable = await services.models.unreachable(models)
    is_complete = all(services.line_jobs.servers.is_mapped(name) for name in unreachable)
    known = {name: number for name, number in models.items() if name not in unreachable}
    errors += await _unknown_models(services, known, MAX_ERRORS - len(errors))
    errors.sort(key=lambda error: error.line or 0)
    return Validation(num_lines, next(iter(models)) if len(models) == 1 else None, errors, is_complete)


async def _unknown_models(services: BatchServices, models: dict[str, int], most: int) -> list[BatchError]:
    """Return the errors of the first lines that name a model that is not served, at most `most`."""
    serving = await services.models.serving(models)
    errors: list[BatchError] = []
    for model, number in models.items():
        if len(errors) == most:
            break
        if not serving[model]:
            error = services.models.not_served(model, "body.model")
            errors.append(BatchError(code="model_not_found", message=error.message, line=number, param=error.field))
    return errors


def split_lines(chunk: bytes) -> list[bytes]:
    """Split a chunk into lines. Blank lines are empty: they only count in line numbers."""
    lines = [line.strip() for line in chunk.split(b"\n")]
    return lines[:-1] if not lines[-1] else lines


def _validate_line(
    text: bytes, number: int, batch: Batch, custom_ids: set[str], models: dict[str, int]
) -> BatchError | None:
    """Return what is wrong with a line; add its custom_id and its model to those of the file."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        message = f"the line is not UTF-8 from its byte {error.start + 1} on: save the file as UTF-8"
        return BatchError(code="invalid_json_line", message=message, line=number)
    try:
        line = wire.parse(text, Line, name="the line")
    except wire.Invalid as error:
        code = "invalid_json_line" if error.field is None else "invalid_line"
        return BatchError(code=code, message=error.message, line=number, param=error.field)
    if line.custom_id in custom_ids:
        message = f"custom_id: {wire.quote(line.custom_id)} is the custom_id of an earlier line"
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
