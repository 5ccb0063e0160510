"""The base of every spec: closed, frozen, its attribute docstrings are the reference."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

JsonValue = object
"""Anything that JSON can hold; strings may be templates."""


class Spec(BaseModel):
    """A part of a user's document. Unknown keys are refused; objects are immutable and comparable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True, serialize_by_alias=True
    )
