"""Whole workflows from YAML text, played on the scripted engine."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from masflow.compiler import compile_workflow
from masflow.compiler.plan import Plan
from masflow.models.scripted import ScriptedEngine
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from masflow.trace import EpisodeKey, Trajectory

Compile = Callable[..., Plan]


class Play(Protocol):
    def __call__(
        self, workflow: str, script: Mapping[str, Any], task: Mapping[str, Any] = ..., **options: Any
    ) -> Trajectory: ...


def key(slot: int = 0, sample: int = 0) -> EpisodeKey:
    return EpisodeKey(7, "train", 3, slot, f"task{slot}", sample)


@pytest.fixture
def planned(tmp_path: Path) -> Callable[[str, Mapping[str, str]], Plan]:
    """(workflow's file or function, {file: text}) → a plan in which one policy speaks for everyone."""

    def plan(workflow: str, files: Mapping[str, str]) -> Plan:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
        (tmp_path / "pyproject.toml").touch()
        root, graphs = compile_workflow(f"{tmp_path / workflow}")
        members: dict[str, str] = {}
        _members(graphs, root, "", members)
        return Plan(root, graphs, policy_of=members, root_dir=str(tmp_path))

    return plan


@pytest.fixture
def compiled(planned: Callable[[str, Mapping[str, str]], Plan]) -> Compile:
    """(workflow text, {file: text}) → its plan."""
    return lambda workflow, files=None: planned("main.yaml", {**(files or {}), "main.yaml": workflow})


def _members(graphs: Mapping[str, Any], name: str, prefix: str, found: dict[str, str]) -> None:
    for role in graphs[name].roles:
        for member in role.members or (role.name,):
            found[f"{prefix}{member}"] = "policy"
    for node in graphs[name].nodes:
        if node.workflow:
            _members(graphs, node.workflow, f"{prefix}{node.name}/", found)


@pytest.fixture
def played(compiled: Compile) -> Play:
    """Compile, play one episode on a script, give its trajectory."""

    def play_(
        workflow: str,
        script: Mapping[str, Any],
        task: Mapping[str, Any] | None = None,
        files: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Trajectory:
        player = Player(compiled(workflow, files), **options)
        [trajectory] = play(player, [player.start(dict(task or {}), key())], ScriptedEngine(script).generate)
        return trajectory

    return play_
