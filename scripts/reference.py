"""The generated pages of the reference: options, metrics, paths of the server, commands.

All are read from the definitions that the code itself works with.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

from fastapi.routing import APIRoute

from kvboost.bench.tables import table
from kvboost.cli.main import make_parser
from kvboost.config import Options
from kvboost.server.app import Endpoints
from kvboost.server.documented import STATUSES, DocumentedApp
from kvboost.server.metrics import METRICS
from kvboost.server.options import PREFIX, ServerOptions, in_units

REFERENCE_OF_SERVE = "Its flags are [a page of their own](server-options.md)."
PLAIN = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "null": "null",
    "object": "object",
}


def options_table() -> str:
    """Every option of the engine with its default and meaning."""
    rows = [
        (f"`{each.name}`", f"`{each.default!r}`", each.metadata["help"])
        for each in dataclasses.fields(Options)
    ]
    return table(("option", "default", "meaning"), rows)


def server_options() -> str:
    """Every option of the server: its flag, its variable, its name in a file."""
    parts = []
    for title, kind in (("Of the server", ServerOptions), ("Of its engine", Options)):
        rows = [
            (
                f"`--{each.name.replace('_', '-')}`<br>"
                f"`{PREFIX}{each.name.upper()}`<br>`{each.name}`",
                _default(each),
                each.metadata["help"],
            )
            for each in dataclasses.fields(kind)
        ]
        head = ("flag, variable, name in a file", "default", "meaning")
        parts += [f"## {title}", table(head, rows)]
    return "\n\n".join(parts)


def metrics_table() -> str:
    """Every metric of the server with its kind, labels and meaning."""
    rows = [(f"`{each.name}`", each.kind, ", ".join(each.labels), each.help) for each in METRICS]
    return table(("metric", "kind", "labels", "meaning"), rows)


def http_paths() -> str:
    """The paths, bodies and answers of the server, from its OpenAPI document."""
    app = DocumentedApp(title="KVBoost")
    nobody: Any = None  # paths are described, not called
    Endpoints(nobody, nobody, nobody, nobody, nobody).add_to(app)
    document = app.openapi()
    restricted = {
        each.path_format for each in app.routes if isinstance(each, APIRoute) and each.dependencies
    }
    parts = ["## Paths"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"### {method.upper()} {path}")
            parts += _operation(operation, is_restricted=path in restricted)
    statuses = [(str(status), text) for status, text in STATUSES.items()]
    parts += ["## Statuses", "Success is 200. Errors have an [ErrorBody](#errorbody) and one of:"]
    parts += [table(("status", "when"), statuses), "## Bodies"]
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts += [f"### {name}", *_schema(schema)]
    return "\n\n".join(parts)


def commands() -> str:
    """Every command with its arguments and examples."""
    with mock.patch.dict(os.environ):
        for name in [each for each in os.environ if each.startswith(PREFIX)]:
            del os.environ[name]  # a variable would be shown as a flag's default
        return "\n\n".join(_command(make_parser(), "##"))


def _command(parser: argparse.ArgumentParser, level: str) -> Iterator[str]:
    yield f"{level} {parser.prog}"
    if parser.description:
        yield parser.description
    below = _below(parser)
    actions = [each for each in parser._actions if each.dest not in ("help", "command", "part")]  # noqa: SLF001
    if parser.prog == "kvboost serve":
        yield REFERENCE_OF_SERVE
    elif actions and not below:
        rows = [(_written(each), _told(each, parser.prog)) for each in actions]
        yield table(("argument", "meaning"), rows)
    elif below:
        rows = [(f"`{name}`", text) for name, (_, text) in below.items()]
        yield table(("command", "what it does"), rows)
    if parser.epilog:
        yield f"```text\n{parser.epilog.strip()}\n```"
    for each, _ in below.values():
        yield from _command(each, level if parser.prog == "kvboost" else level + "#")


def _below(parser: argparse.ArgumentParser) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """The commands of a command by name, each with a line of help."""
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            helps = {each.dest: each.help or "" for each in action._choices_actions}  # noqa: SLF001
            return {name: (made, helps[name]) for name, made in action.choices.items()}
    return {}


def _written(action: argparse.Action) -> str:
    """An argument as it is typed."""
    names = action.option_strings
    if names and action.nargs == 0:
        return f"`{', '.join(names)}`"
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    if action.nargs in ("*", "+"):
        value = f"{value} ..."
    return f"`{', '.join(names)} {value}`" if names else f"`{value}`"


def _told(action: argparse.Action, program: str) -> str:
    text = (action.help or "") % {**vars(action), "prog": program}
    return f"{text} (required)" if action.option_strings and action.required else text


def _default(option: dataclasses.Field[Any]) -> str:
    """As one would write it in a flag."""
    value = option.default
    if value in (None, "", ()):
        return ""
    if option.name.endswith("_bytes"):
        return f"`{in_units(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _operation(operation: dict[str, Any], *, is_restricted: bool) -> Iterator[str]:
    text = operation["description"]
    yield f"{text} Needs an admin key." if is_restricted else text
    if "parameters" in operation:
        rows = [
            (f"`{each['name']}`", f"in the {each['in']}", _kind(each["schema"]))
            for each in operation["parameters"]
        ]
        yield table(("parameter", "where", "type"), rows)
    said = []
    if "requestBody" in operation:
        said.append(f"Body: {_content(operation['requestBody']['content'])}.")
    answer = operation["responses"]["200"]["content"]
    said.append(f"Response: {_content(answer)}.")
    if "text/event-stream" in answer:
        data = answer["text/event-stream"]["itemSchema"]["properties"]["data"]["description"]
        said.append(f"With `stream`: server-sent events, each with {data}.")
    yield " ".join(said)


def _content(content: dict[str, Any]) -> str:
    if "application/json" in content:
        return _kind(content["application/json"]["schema"])
    return "an HTML page" if "text/html" in content else "plain text"


def _schema(schema: dict[str, Any]) -> Iterator[str]:
    if "description" in schema:
        yield schema["description"].split("\n")[0]
    required = schema.get("required", [])
    rows = []
    for name, each in schema.get("properties", {}).items():
        kind = _kind(each, may_be_null=name in required)
        rows.append((f"`{name}`", kind + (", required" if name in required else ""),
                     each.get("description", "")))  # fmt: skip
    if rows:
        yield table(("field", "type", "meaning"), rows)


def _kind(schema: dict[str, Any], *, may_be_null: bool = True) -> str:
    """A JSON schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema or "oneOf" in schema:
        kinds = [_kind(each) for each in schema.get("anyOf") or schema["oneOf"]]
        return " or ".join(dict.fromkeys(k for k in kinds if may_be_null or k != "null"))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{str(v).lower() if isinstance(v, bool) else v}`" for v in values)
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}{_limits(schema, 'Items', 'entries')}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"object with values of {_kind(schema['additionalProperties'])}"
    kind = PLAIN.get(schema.get("type", ""), "anything")
    return kind + _limits(schema, "Length", "characters") + _range(schema)


def _limits(schema: dict[str, Any], what: str, unit: str) -> str:
    low, high = schema.get(f"min{what}"), schema.get(f"max{what}")
    if high is not None:
        return f" ({low or 0} to {high} {unit})"
    return f" (at least {low})" if low else ""


def _range(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if "exclusiveMinimum" in schema:
        limit = "" if high is None else f", up to {high:g}"
        return f" (above {schema['exclusiveMinimum']:g}{limit})"
    if low is not None and high is not None and high < 2**53:
        return f" ({low:g} to {high:g})"
    return f" (at least {low:g})" if low is not None and high is None else ""
