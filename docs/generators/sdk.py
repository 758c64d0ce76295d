"""Write the reference in docs/sdk.md from the SDK's sources and docstrings: `make docs`. A test compares them."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

import scorepool
from scorepool import options, webhook, wire
from scorepool.files import Divergence, Estimate, Mean, Perplexity, Summary
from scorepool.files.file_run import FileOptions
from scorepool.sdk import client, errors
from scorepool.sdk.batches import Batches
from scorepool.sdk.models import Models
from scorepool.sdk.webhooks import Webhooks

DOCUMENT = Path(__file__).parents[1] / "sdk.md"
MARK = "<!-- `make docs` writes the rest. -->\n"
ROOMS = {"Jobs": client.Client, "Models": Models, "Files and batches": Batches, "Webhooks": Webhooks}
FUNCTIONS = (scorepool.score_file, scorepool.generate_file, scorepool.compare_file, scorepool.perplexity)
REQUESTS = {
    "score": (options.ScoreOptions, wire.Score),
    "compare": (options.CompareOptions, wire.Compare),
    "generate": (options.GenerateOptions, wire.Generate),
    "classify": (options.ClassifyOptions, wire.Classify),
    "embed": (options.EmbedOptions, wire.Embed),
    "tokenize": (options.TokenizeOptions, wire.Tokenize),
}
MESSAGES = (
    wire.Result,
    wire.SequenceResult,
    wire.ModelComparison,
    wire.Divergence,
    wire.ComparedSequence,
    wire.Classification,
    wire.Embedding,
    wire.Job,
    wire.TokenDelta,
    wire.Progress,
    wire.Failure,
    wire.Usage,
    wire.Provenance,
)
COMMENT = re.compile(r"^    (\w+): .*  # (?!noqa)(.+)$", re.MULTILINE)  # of a field
TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None", "object": "dict"}


def render(text: str) -> str:
    """Return the page with its reference made anew."""
    guide, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"{DOCUMENT} has no line {MARK!r}")
    return guide + mark + "\n" + "\n".join(_reference())


def _reference() -> Iterator[str]:
    yield "# Reference\n"
    yield (
        "`AsyncClient` has the same methods: `await` those that return, and iterate with `async for` over those that "
        "yield.\n`wire` is `scorepool.wire`.\n"
    )
    yield _described("Client", client.Client)
    yield _function("Client", client.Client.__init__)
    for title, room in ROOMS.items():
        yield f"## {title}\n"
        yield from _methods("client", room)
    yield "## Handles of jobs\n"
    yield _described("JobHandle", client.JobHandle)
    yield from _methods("job", client.JobHandle)
    yield "## Options\n"
    for name, (typed_dict, request) in REQUESTS.items():
        yield f"### Options of `{name}`\n"
        yield from _table(typed_dict.__annotations__, request)
    yield "## Functions on files\n"
    for function in FUNCTIONS:
        yield _function(function.__name__, function)
    yield "### Options of these functions\n"
    yield from _table(FileOptions.__annotations__, FileOptions)
    for message in (Summary, Mean, Divergence, Estimate, Perplexity):
        yield _described(message.__name__, message)
        yield from _table(message.__struct_fields__, message)
    yield "## Messages\n"
    for message in MESSAGES:
        yield _described(message.__name__, message)
        yield from _table(message.__struct_fields__, message)
        yield from _methods("result" if message is wire.Result else "sequence", message)
    yield "## Exceptions\n"
    for name, error in vars(errors).items():
        if inspect.isclass(error) and error.__module__ == errors.__name__ and not name.startswith("_"):
            yield _described(name, error)
    yield "## Receivers of webhooks\n"
    yield _function("verify_webhook", webhook.verify_webhook)
    yield _described("WebhookError", webhook.WebhookError)


def _described(name: str, kind: type) -> str:
    return f"### `{name}`\n\n{inspect.getdoc(kind)}\n"


def _methods(owner: str, kind: type) -> Iterator[str]:
    """Yield the public methods that a class itself defines, in their order."""
    for name, method in vars(kind).items():
        if inspect.isfunction(method) and not name.startswith("_"):
            yield _function(f"{owner}.{name}", method)


def _function(name: str, function: Callable[..., Any]) -> str:
    """Write the signature as it is in the source, and the docstring."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.args.args = [each for each in definition.args.args if each.arg != "self"]
    signature = f"{name}({ast.unparse(definition.args)})"
    if definition.returns is not None:
        signature += f" -> {ast.unparse(definition.returns).strip(chr(39))}"
    lines = textwrap.wrap(signature, 110, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    code = "\n".join(lines)
    return f"#### `{name}`\n\n```text\n{code}\n```\n\n{inspect.getdoc(function)}\n"


def _table(names: Any, message: type) -> Iterator[str]:
    """Yield a table of fields with their types, defaults and descriptions."""
    _, schemas = msgspec.json.schema_components([message], schema_hook=_schema, ref_template="{name}")
    properties = schemas[message.__name__]["properties"]
    comments = dict(COMMENT.findall(inspect.getsource(message)))
    yield "| field | type | default | |\n|---|---|---|---|"
    for name in names:
        schema = properties[name]
        default = f"`{schema['default']!r}`" if "default" in schema else ""
        yield f"| `{name}` | {_type(schema)} | {default} | {_description(schema) or comments.get(name, '')} |"
    yield ""


def _schema(kind: type) -> dict[str, Any]:
    return {"type": kind.__name__}


def _type(schema: dict[str, Any]) -> str:
    match schema:
        case {"anyOf": kinds}:
            return " or ".join(dict.fromkeys(map(_type, kinds)))
        case {"$ref": name}:
            return str(name)
        case {"enum": values}:
            return ", ".join(f"`{value!r}`" for value in values)
        case {"const": value}:
            return f"`{value!r}`"
        case {"type": "array", "items": items}:
            return f"list[{_type(items)}]"
        case {"contentEncoding": "base64"}:
            return "bytes"
        case {"type": str(name)}:
            return TYPES.get(name, name)
    return "Any"


def _description(schema: dict[str, Any]) -> str:
    kinds = (schema, *schema.get("anyOf", ()))
    found = next((each["description"] for each in kinds if "description" in each and "$ref" not in each), "")
    return str(found).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    DOCUMENT.write_text(render(DOCUMENT.read_text()))
