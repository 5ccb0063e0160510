"""JSON Schemas of the documents, shorthands included, for editors that complete and check YAML."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from copy import deepcopy
from importlib.metadata import entry_points
from typing import Any

from pydantic import BaseModel

from masflow.spec.base import Spec
from masflow.spec.experiment import ALGORITHMS, Experiment
from masflow.spec.mapping import Mapping
from masflow.spec.runtime import Runtime
from masflow.spec.workflow import Workflow

KINDS: dict[str, type[BaseModel]] = {
    "workflow": Workflow,
    "experiment": Experiment,
    "mapping": Mapping,
    "runtime": Runtime,
}
SCALAR_TYPE = {"type": "string", "pattern": r"^(str|int|float|bool|any)\??$"}
TYPE = {
    "description": "str, int, float, bool, any, [TYPE], [word, word] or {name: TYPE}; `str?` may be null.",
    "anyOf": [
        SCALAR_TYPE,
        {
            "type": "array",
            "minItems": 1,
            "items": {"type": ["string", "number", "boolean", "array", "object"]},
        },
        {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": {"type": ["string", "array", "object"]},
        },
    ],
}
NODES = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
EDGE = {
    "anyOf": [
        {"type": "string", "pattern": "->", "description": "a -> b & c when EXPR"},
        {
            "type": "object",
            "properties": {"from": NODES, "to": NODES, "when": {"type": ["string", "boolean"]}},
            "required": ["from", "to"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {
                "from": NODES,
                "switch": {"type": "string"},
                "to": {"type": "object", "additionalProperties": NODES, "minProperties": 1},
            },
            "required": ["from", "switch", "to"],
            "additionalProperties": False,
        },
    ]
}
EXPRESSIONS = ("when", "foreach", "speaker", "key")


def _describe(bodies: dict[str, dict[str, Any]]) -> None:
    """Put the attribute docstrings where they belong. Pydantic would read them whenever a spec is imported,
    a fifth of what `masflow check` takes."""
    classes = {cls.__name__: cls for cls in _below(Spec)}
    for name, body in bodies.items():
        cls = classes.get(name)
        docs = {} if cls is None else _docs(cls)
        for key, inner in body.get("properties", {}).items():
            if docs.get(key):
                inner.setdefault("description", docs[key])


def _below(cls: type[Spec]) -> Iterator[type[Spec]]:
    yield cls
    for inner in cls.__subclasses__():
        yield from _below(inner)


def _docs(cls: type[Spec]) -> dict[str, str | None]:
    """Key → docstring of each field of a spec, its own and those that it takes over."""
    docs: dict[str, str | None] = {}
    for one in reversed(cls.__mro__):
        if not issubclass(one, Spec):
            continue
        [parsed] = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        assert isinstance(parsed, ast.ClassDef)
        for statement, following in zip(parsed.body, [*parsed.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                docs[statement.target.id] = _text(following)
    return {
        cls.model_fields[name].alias or name: doc for name, doc in docs.items() if name in cls.model_fields
    }


def _text(statement: ast.stmt | None) -> str | None:
    value = statement.value if isinstance(statement, ast.Expr) else None
    found = value.value if isinstance(value, ast.Constant) else None
    return inspect.cleandoc(found) if isinstance(found, str) else None


def document_schema(kind: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one kind of document, as YAML writes it.

    Args:
        kind: `workflow`, `experiment`, `mapping` or `runtime`.
    Raises:
        KeyError: another kind.
    """
    schema = KINDS[kind].model_json_schema()
    defs = schema.setdefault("$defs", {})
    _describe({**defs, KINDS[kind].__name__: schema} if "$ref" not in schema else defs)
    if kind == "workflow" and "$ref" in schema:
        schema = {"$defs": defs, **{k: v for k, v in schema.items() if k != "$defs"}}
    for name, body in list(defs.items()):
        _write_as_yaml(name, body)
        defs[name] = _with_shorthand(name, body)
    _write_as_yaml(KINDS[kind].__name__, schema)
    defs.pop("Edge", None)
    defs.pop("Type", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _write_as_yaml(name: str, body: dict[str, Any]) -> None:
    """Change the fields that a document writes in another form than the spec holds."""
    fields = body.get("properties", {})
    for key in EXPRESSIONS:
        if key in fields:
            fields[key] = {
                "description": fields[key].get("description", ""),
                "type": ["string", "boolean", "null"],
            }
    if "edges" in fields:
        fields["edges"] = {"type": "array", "items": deepcopy(EDGE)}
    if "type" in fields and name in ("TaskField", "StateField"):
        fields["type"] = deepcopy(TYPE)
    if "parameters" in fields:
        fields["parameters"] = {"type": "object", "additionalProperties": deepcopy(TYPE)}
    if "reply" in fields:
        fields["reply"] = {"anyOf": [{"enum": ["text", "code"]}, fields["reply"]]}
        fields["reply"]["anyOf"][1].pop("default", None)
    if "passes" in fields:
        entry = {"type": "object", "minProperties": 1, "maxProperties": 1}
        fields["passes"] = {"type": "array", "items": {"anyOf": [{"type": "string"}, entry]}}
    for key in ("stop", "after", "roles", "nodes", "to"):
        if name in ("Sampling", "Measure", "Reward") and key in fields:
            fields[key] = {**deepcopy(NODES), "description": fields[key].get("description", "")}
    if name == "SetNode":
        body["anyOf"] = [{"required": ["set"]}, {"required": ["write"]}]
    if name.endswith("Reply"):
        _reply(name, body, fields)


def _reply(name: str, body: dict[str, Any], fields: dict[str, Any]) -> None:
    fields.pop("format", None)
    word = name.removesuffix("Reply").lower()
    types = {"type": "object", "additionalProperties": deepcopy(TYPE), "minProperties": 1}
    if word == "json":
        fields.pop("fields", None)
        fields.pop("json_schema", None)
        fields["json"] = {"description": "Fields and their types, or a JSON Schema.", "type": "object"}
    elif word == "tags":
        fields["tags"] = types
    elif word == "text":
        fields["text"] = {"type": "null"}
    elif word == "choice":
        words = {"type": "array", "minItems": 1, "items": {"type": ["string", "number", "boolean"]}}
        fields["choice"] = {"anyOf": [words, {"type": "string", "pattern": r"\{\{"}]}
    elif word == "code":
        fields["code"] = {"type": ["string", "null"]}
    body["required"] = [] if word == "text" else [word]


def _with_shorthand(name: str, body: dict[str, Any]) -> dict[str, Any]:
    if name in ("TaskField", "StateField"):
        return {"anyOf": [body, deepcopy(TYPE)]}
    if name == "Endpoint":
        return {"anyOf": [body, {"type": "string", "pattern": "^https?://"}]}
    if name == "Algorithm":
        names = [*ALGORITHMS, *(entry.name for entry in entry_points(group="masflow.algorithms"))]
        body["properties"]["use"]["enum"] = names
        return {"anyOf": [body, {"type": "string", "enum": names}]}
    if name in ("Overlong", "Dynamic"):
        return {"anyOf": [body, {"const": False}]}
    if name == "Adapter":
        return {"anyOf": [body, deepcopy(body["properties"]["roles"])]}
    if name == "Engine":
        return {"anyOf": [body, {"type": "string", "enum": body["properties"]["use"]["enum"]}]}
    return body
