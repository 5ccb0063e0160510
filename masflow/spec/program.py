"""A workflow whose steps an async Python function takes, as objects: what its decorator declares."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from masflow.spec.edges import Edges
from masflow.spec.names import check_names
from masflow.spec.workflow import Node, Workflow

__all__ = ["Program"]

LEFT_OUT = ("name", "function", "nodes", "state", "edges")
"""Keys that nobody writes in a decorator: it fills them in, or a function has no use for them."""


class Program(Workflow):
    """What `@workflow` declares: all of a workflow but its graph."""

    function: str
    """`file.py:name` of the function."""
    timeout_s: float = Field(default=30.0, gt=0, le=1e6)
    """Of the function's own code between two awaits, in seconds."""
    nodes: Annotated[dict[str, Node], check_names("role, tool or workflow", reserved=True)] = Field(
        default_factory=dict
    )
    """What may be called: a node a role, a tool and a sub-workflow."""
    edges: Edges = ()

    hints: ClassVar[dict[str, str]] = {**Workflow.hints, "timeout": "timeout_s", "prompts": "roles"}

    @classmethod
    def known_keys(cls) -> tuple[str, ...]:
        return tuple(key for key in super().known_keys() if key not in LEFT_OUT)
