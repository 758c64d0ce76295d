"""Write docs/jobs.md and docs/routes.md from the OpenAPI document of the API: `make docs`. A test compares them.

A message that jobs need is described in jobs.md, any other in routes.md.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from scorepool.api.app import create_app
from scorepool.api.http.openapi import references
from scorepool.store import Settings

JOBS, ROUTES = (Path(__file__).parents[1] / f"{name}.md" for name in ("jobs", "routes"))
SECTIONS = {  # of jobs.md; what these messages hold comes after them
    "Kinds of jobs": ("Score", "Generate", "Tokenize", "Classify", "Embed"),
    "The job": ("Accepted", "Job", "JobPage"),
    "Results": ("Result",),
    "Failures": ("Failure",),
    "Streams": ("TokenDelta", "Progress", "Restart"),
    "Webhooks": ("JobEvent",),
    "Refused requests": ("ErrorReply",),
}
TAGS = {  # sections of routes.md
    "jobs": "Jobs",
    "models": "Models",
    "weights": "Weights",
    "openai": "OpenAI's routes",
    "anthropic": "Anthropic's routes",
    "tokens": "Tokens",
    "trl": "TRL's route",
    "vllm": "vLLM's routes",
    "sglang": "SGLang's routes",
    "openrlhf": "OpenRLHF's route",
    "swift": "ms-swift's route",
    "webhooks": "Webhooks",
    "operations": "Operations",
}
JOBS_INTRODUCTION = """# Jobs, results, failures

`make docs` writes this page from the types in `wire/`. A job is submitted with its kind in the field `type`, and ends
in a [result](#results) or a [failure](#failures). [http.md](http.md) shows one job with its result, [sdk.md](sdk.md)
the same in Python, [routes.md](routes.md) where these messages are sent. A job of many items whose worker dies goes on
with the items that were not finished, see [operations.md](operations.md#long-jobs).
"""
ROUTES_INTRODUCTION = """# Routes

`make docs` writes this page from `/openapi.json`, which `/docs` of a running server shows with requests to try. Bodies
are JSON or msgpack. An answer outside 2xx is an [ErrorReply](jobs.md#errorreply); any route can answer 500. Routes of
other servers' APIs are explained in [openai.md](openai.md).
"""


class Reference:
    """Renders one OpenAPI document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.paths: dict[str, dict[str, Any]] = document["paths"]
        self.schemas: dict[str, dict[str, Any]] = document["components"]["schemas"]
        self.sections = self._sections()
        self.homes = dict.fromkeys(self.schemas, ROUTES.name)
        self.homes |= {name: JOBS.name for names in self.sections.values() for name in names}

    def _sections(self) -> dict[str, list[str]]:
        """Return the messages of each section of jobs.md: each once, before those that it holds."""
        seen: set[str] = {name for names in SECTIONS.values() for name in names}
        sections = {}
        for title, names in SECTIONS.items():
            found = list(names)
            for name in found:
                new = [each for each in references(self.schemas[name]) if each not in seen]
                seen.update(new)
                found.extend(new)
            sections[title] = found
        return sections

    def jobs(self) -> str:
        """Return the page of jobs."""
        lines = [JOBS_INTRODUCTION]
        for title, names in self.sections.items():
            lines.append(f"## {title}\n")
            for name in names:
                lines.extend(self._message(name, JOBS.name))
                if name == "Failure":
                    lines.extend(self._failure_codes())
        return "\n".join(lines)

    def _failure_codes(self) -> Iterator[str]:
        """Yield the table of failure codes."""
        code = self.schemas["Failure"]["properties"]["code"]
        found = re.findall(r"`(\w+)`: (.*?)\.(?= `|$)", code["description"])
        if {name for name, _ in found} != set(code["enum"]):
            raise ValueError("the description of `code` does not explain every code")
        yield "### Failure codes\n\n| `code` | reason |\n|---|---|"
        yield from (f"| `{name}` | {text} |" for name, text in found)
        yield ""

    def routes(self) -> str:
        """Return the page of routes."""
        lines = [ROUTES_INTRODUCTION]
        for tag, title in TAGS.items():
            lines.append(f"## {title}\n")
            for path, methods in self.paths.items():
                for method, operation in methods.items():
                    if tag in operation["tags"]:
                        lines.extend(self._operation(f"{method.upper()} {path}", operation))
        lines.append("## Messages of these routes\n")
        for name in sorted(name for name, home in self.homes.items() if home == ROUTES.name):
            lines.extend(self._message(name, ROUTES.name))
        return "\n".join(lines)

    def _operation(self, route: str, operation: dict[str, Any]) -> Iterator[str]:
        yield f"### {operation['summary']}\n\n`{route}`: {operation['description']}\n"
        if parameters := operation.get("parameters"):
            yield "| parameter | in | type | default | |\n|---|---|---|---|---|"
            for each in parameters:
                schema = each["schema"]
                yield _row(
                    f"`{each['name']}`",
                    each["in"],
                    self._type(schema, ROUTES.name),
                    _default(schema),
                    each.get("description") or schema.get("description", ""),
                )
            yield ""
        if body := operation.get("requestBody"):
            yield f"Body: {self._content(body['content'])}.\n"
        replies = {status: reply for status, reply in operation["responses"].items() if status.startswith("2")}
        errors = sorted(operation["responses"].keys() - replies.keys() - {"500"})
        shown = (f"{status} {self._content(reply.get('content', {}))}".rstrip() for status, reply in replies.items())
        yield f"Replies: {', '.join([*shown, *errors])}.\n"

    def _content(self, content: dict[str, Any]) -> str:
        """Name the messages of a body, and the events of a stream."""
        kinds = {
            self._type(each["schema"], ROUTES.name)
            for media_type, each in content.items()
            if media_type != "text/event-stream"
        }
        if stream := content.get("text/event-stream"):
            kinds |= {f"a stream of {self._events(stream['schema']['anyOf'])}"}
        if form := content.get("multipart/form-data"):
            kinds = {"form with " + ", ".join(f"`{name}`" for name in form["schema"]["properties"])}
        return " or ".join(sorted(kinds))

    def _events(self, events: list[dict[str, Any]]) -> str:
        """Name the events of a stream with their data."""
        named = []
        for event in events:
            data = event["properties"]["data"]
            shown = self._type(data["contentSchema"], ROUTES.name) if "contentSchema" in data else f"`{data['const']}`"
            named.append(f"`{event['properties']['event']['const']}` ({shown})")
        return ", ".join(named)

    def _message(self, name: str, page: str) -> Iterator[str]:
        """Yield the section of a message: its description and its fields."""
        schema = self.schemas[name]
        yield f"### {name}\n\n{schema.get('description', '')}\n"
        if not schema["properties"]:
            return
        yield "| field | type | default | |\n|---|---|---|---|"
        required = schema.get("required", ())
        for field, each in schema["properties"].items():
            default = "required" if field in required and "default" not in each else _default(each)
            yield _row(f"`{field}`", self._type(each, page), default, self._description(each))
        yield ""

    def _description(self, schema: dict[str, Any]) -> str:
        kinds = (schema, *schema.get("anyOf", ()))
        found: Iterable[str] = (each["description"] for each in kinds if "description" in each and "$ref" not in each)
        return next(iter(found), "")

    def _type(self, schema: dict[str, Any], page: str) -> str:
        match schema:
            case {"anyOf": kinds}:
                return " or ".join(dict.fromkeys(self._type(kind, page) for kind in kinds))
            case {"$ref": reference}:
                name = reference.rpartition("/")[2]
                home = self.homes[name]
                return f"[{name}]({'' if home == page else home}#{name.lower()})"
            case {"enum": values}:
                return ", ".join(f"`{json.dumps(value)}`" for value in values)
            case {"const": value}:
                return f"`{json.dumps(value)}`"
            case {"type": "array", "items": items}:
                return f"array{_limits(schema)} of {self._type(items, page)}"
            case {"type": list() as kinds}:
                return " or ".join(kinds)
            case {"contentEncoding": "base64"}:
                return "base64"
            case {"type": str(name)}:
                return f"{name}{_limits(schema)}"
        return "any"


def _limits(schema: dict[str, Any]) -> str:
    """Write the limits of a number, a string or an array."""
    for suffix, unit in ("Length", " characters"), ("Items", " items"), ("imum", ""):
        least, most = schema.get(f"min{suffix}"), schema.get(f"max{suffix}")
        above = f"above {_number(schema['exclusiveMinimum'])}, " if "exclusiveMinimum" in schema else ""
        if least is not None and most is not None:
            return f" ({_number(least)} to {_number(most)}{unit})"
        if most is not None:
            return f" ({above}at most {_number(most)}{unit})"
        if least is not None:
            return f" (at least {_number(least)}{unit})"
    return ""


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _default(schema: dict[str, Any]) -> str:
    return f"`{json.dumps(schema['default'])}`" if "default" in schema else ""


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"


def render() -> dict[Path, str]:
    """Return the two pages."""
    reference = Reference(create_app(Settings()).openapi())
    return {JOBS: reference.jobs(), ROUTES: reference.routes()}


if __name__ == "__main__":
    for path, text in render().items():
        path.write_text(text)
