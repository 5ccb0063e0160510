"""Compile a workflow from its edges or its text, in a folder of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from masflow.compiler import compile_workflow
from masflow.compiler.graph import Arrow, Graph, Node

WORKFLOW = """
name: tiny
task: {question: str}
roles:
  planner: {prompt: "Plan {{ question }}", reply: {tag: plan}}
  wolf: {prompt: "Howl {{ question }}", copies: 3}
  reader: {prompt: "Read {{ question }}", tools: [sums]}
tools: {sums: {use: calculator}}
nodes: {plan: {role: planner}, howl: {role: wolf}, read: {role: reader, foreach: "[1, 2]", as: part}}
edges:
  - start -> plan -> howl -> read
  - read -> plan when visits.plan < 2
  - read -> end
rewards: [{name: form, use: well_formed, level: turn}]
"""
EXPERIMENT = """
workflow: workflow.yaml
mapping: {models: {policy: {roles: rest}}}
base: some/base
data: {train: rows.jsonl}
"""
ROWS = '{"question": "what"}\n{"question": "who"}\n'


@pytest.fixture
def tiny() -> dict[str, str]:
    """The files of a small experiment: a planner, three wolves, a reader with a tool, in a loop."""
    return {"tiny.yaml": EXPERIMENT, "workflow.yaml": WORKFLOW, "rows.jsonl": ROWS}


@pytest.fixture
def project(tmp_path: Path) -> Callable[..., Path]:
    """`project({"a.yaml": text, …})` writes files into a project's root and gives the first one's path."""

    def write(files: dict[str, str]) -> Path:
        (tmp_path / "workflows").mkdir(exist_ok=True)
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path / next(iter(files))

    return write


@pytest.fixture
def graph_of(project: Callable[..., Path]) -> Callable[..., Graph]:
    """`graph_of(text, **files)` compiles a workflow and gives its root graph."""

    def compiled(text: str, files: dict[str, str] | None = None) -> Graph:
        root, graphs = compile_workflow(project({"tiny.yaml": text, **(files or {})}))
        return graphs[root]

    return compiled


def _drawn(edges: dict[str, list[str]], joins: dict[str, str] | None = None) -> Graph:
    """A graph of set nodes: `{"start": ["a"], "a": ["b & c"], …}`; each text is one arrow."""
    ways = {
        name: tuple(
            Arrow(tuple(t.split(" & ")), when="true" if i < len(out) - 1 else None) for i, t in enumerate(out)
        )
        for name, out in edges.items()
    }
    nodes = tuple(
        Node(name, "set", arrows, join=(joins or {}).get(name, "all"))  # type: ignore[arg-type]
        for name, arrows in ways.items()
        if name != "start"
    )
    return Graph("drawn", nodes=nodes, start=ways["start"])


@pytest.fixture
def drawn() -> Callable[..., Graph]:
    return _drawn
