"""What the README shows works: its workflow compiles, its Python makes the same one, its commands exist."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler import compile_workflow
from masflow.compiler.plan import Plan
from masflow.models.scripted import ScriptedEngine
from masflow.project import load
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from masflow.trace import EpisodeKey

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)[number]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "workflows").mkdir()
    shutil.copytree(ROOT / "rewards", tmp_path / "rewards", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "passages.jsonl").write_text('{"id": "1", "text": "kabul is the capital of afghanistan"}\n')
    (tmp_path / "lookup.yaml").write_text(block("yaml"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_workflow_is_fifteen_lines_and_compiles(project: Path):
    assert len(block("yaml").splitlines()) <= 15
    root, graphs = compile_workflow(load(project / "lookup.yaml"))
    assert [node.name for node in graphs[root].nodes] == ["plan", "find", "answer"]


def test_the_python_makes_the_same_document(project: Path):
    (project / "lookup.py").write_text(block("python"))
    made: dict[str, Any] = {"__name__": "lookup"}
    exec(compile(block("python"), str(project / "lookup.py"), "exec"), made)
    assert made["team"].build().spec == load(project / "lookup.yaml").spec


def test_the_function_plays(project: Path):
    (project / "research.py").write_text(block("python", 1))
    (project / "pyproject.toml").touch()
    root, graphs = compile_workflow(f"{project / 'research.py'}:research")
    players = {role.name: "policy" for role in graphs[root].roles}
    player = Player(Plan(root, graphs, policy_of=players, root_dir=str(project)))
    script = {
        "lead": ['{"topics": ["kabul", "herat", "kabul"]}'],
        "scout": lambda request: f"<note>{request.messages[-1].content}</note>",
        "writer": ["<answer>kabul</answer>"],
    }
    task = {"question": "capital of afghanistan", "answers": ["Kabul"]}
    states = [player.start(task, EpisodeKey(0, "train", 0, 0, "0", 0))]
    [episode] = play(player, states, ScriptedEngine(script).generate)
    assert (episode.outcome, episode.output) == ("ok", {"answer": "kabul"})
    assert [turn.member for turn in episode.turns] == ["lead", "scout", "scout", "writer"]
    assert "What is known of herat?" in episode.turns[-1].messages[-1].content


def test_the_commands_are_commands():
    named = set(re.findall(r"^masflow (\w+)", README, re.M))
    assert named >= {"train", "check", "explain", "run"}
    shown = subprocess.run([sys.executable, "-m", "masflow", "--help"], capture_output=True, text=True)
    for name in named:
        assert re.search(rf"\b{name}\b", shown.stdout), name


def test_the_folders_of_the_tree_exist():
    tree = README.split("## Where things are")[1]
    names = re.findall(r"(?:^|  )(\w+)/ ", tree, re.M)
    assert len(names) > 10
    for name in names:
        assert (ROOT / name).is_dir() or (ROOT / "masflow" / name).is_dir(), name
