"""The documents as objects: workflow, mapping, runtime, experiment."""

from __future__ import annotations

from typing import Any


def schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of one kind of document, for editors that complete YAML."""
    from masflow.spec.json_schema import document_schema

    return document_schema(kind)
