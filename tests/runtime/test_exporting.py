"""`masflow export` over whole runs: what is written where, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from masflow.compiler import compile_experiment
from masflow.errors import RunError
from masflow.runtime import checkpoints
from masflow.runtime.controller import train
from masflow.runtime.exporting import export

Toy = Callable[..., Path]
SHARED = "mapping: {models: {policy: {roles: rest}}}"
ADAPTERS = "mapping: {models: {policy: {roles: rest, train: lora, lora: {rank: 2}, adapters: per_role}}}"
PARTLY = "mapping: {models: {own: {roles: [caller]}, still: {roles: [echoer], train: frozen}}}"


@pytest.fixture(scope="module")
def runs(toy_at: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of two steps: `shared`, `adapters`, `partly`."""
    root = tmp_path_factory.mktemp("runs")
    for name, mapping in (("shared", SHARED), ("adapters", ADAPTERS), ("partly", PARTLY)):
        experiment = toy_at(root / "toy", (SHARED, mapping), ("steps: 4, tasks", "steps: 2, tasks"))
        train(compile_experiment(experiment), root / name)
    return root


def _saved(run: Path, file: str, step: int = 2) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step_{step:06d}/models" / file)


def test_one_policy_is_the_folder_itself_with_the_weights_of_the_step(runs: Path, tmp_path: Path):
    for step in (0, 2):
        found = export(f"{runs / 'shared'}@{step}", tmp_path / str(step))
        assert [one["path"] for one in found["folders"]] == [str(tmp_path / str(step))]
        assert found["step"] == step
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(step), dtype="auto")
        weights = dict(model.named_parameters())
        saved = _saved(runs / "shared", "policy/policy.safetensors", step)
        assert saved and all(torch.equal(weights[name], saved[name]) for name in saved)
    facts = json.loads((tmp_path / "2/export.json").read_text())
    assert facts["roles"] == ["caller", "echoer"] and facts["run"] == "shared" and facts["step"] == 2
    card = (tmp_path / "2/README.md").read_text()
    assert "library_name: transformers" in card and "say {{ word }}" in card
    assert f"| plan | {found['digest']} |" in card


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks transformers
def test_mapping__one_adapter_a_sub_agent_and_the_checkpoint_keeps_one__each_is_a_folder_with_its_base(
    runs: Path, tmp_path: Path
):
    """Row of FIELD_PROBLEMS, Mapping: one adapter a sub-agent: the checkpoint keeps one."""
    found = export(str(runs / "adapters"), tmp_path / "to")
    kinds = {Path(one["path"]).name: one["kind"] for one in found["folders"]}
    assert kinds == {"policy.caller": "adapter", "policy.echoer": "adapter", "policy": "backbone"}
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "to/policy.echoer")
    weights = {name.replace(".default.", "."): p for name, p in model.named_parameters()}
    for name, weight in _saved(runs / "adapters", "policy/policy.echoer.safetensors").items():
        assert torch.equal(weights[f"base_model.model.{name}"], weight)
    # Moved elsewhere together, they load as the card says.
    (tmp_path / "to").rename(tmp_path / "moved")
    card = (tmp_path / "moved/policy.echoer/README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    known: dict[str, Any] = {"FOLDER": str(tmp_path / "moved/policy.echoer")}
    exec(code, known)
    again = {name: p for name, p in known["model"].named_parameters() if "lora" in name}
    assert again and all(torch.equal(p, dict(model.named_parameters())[name]) for name, p in again.items())


def test_a_role_or_a_model_alone_and_merged(runs: Path, tmp_path: Path):
    one = export(str(runs / "adapters"), tmp_path / "one", role="caller")
    assert [Path(f["path"]).relative_to(tmp_path).as_posix() for f in one["folders"]] == [
        "one",
        "one/backbone",
    ]
    merged = export(str(runs / "adapters"), tmp_path / "merged", model="policy", merge=True)
    assert [f["kind"] for f in merged["folders"]] == ["merged", "merged"]
    own = export(str(runs / "partly"), tmp_path / "own")
    assert [f["policy"] for f in own["folders"]] == ["own"]


def test_the_best_step_is_found_by_its_held_out_score(runs: Path, tmp_path: Path):
    last = checkpoints.latest(runs / "shared/checkpoints")
    assert last is not None
    state = checkpoints.read_state(last)
    best = checkpoints.best_step(state, last.parent)
    assert best in (0, 2)
    assert export(f"{runs / 'shared'}@best", tmp_path / "best")["step"] == best
    assert export(f"{runs / 'shared'}@last", tmp_path / "last")["step"] == 2


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        ("shared", {"role": "echoe"}, r"no role 'echoe'; known: caller, echoer\n  fix: write 'echoer'"),
        ("shared", {"model": "policies"}, r"no model 'policies'; known: policy\n  fix: write 'policy'"),
        ("shared", {"merge": True}, "no adapter to merge"),
        ("partly", {"role": "echoer"}, "role 'echoer' is frozen"),
        ("partly", {"model": "still"}, "model 'still' is frozen"),
        ("shared@9", {}, "no checkpoint of step '9'; it holds: step_000000, step_000001, step_000002"),
        ("sharde", {}, "no run at"),
    ],
)
def test_what_can_not_be_exported_is_said(
    runs: Path, tmp_path: Path, run: str, options: dict[str, Any], message: str
):
    with pytest.raises(RunError, match=message):
        export(str(runs / run), tmp_path / "to", **options)
    assert not list(tmp_path.iterdir())


def test_a_role_that_a_server_plays_has_nothing_to_export(runs: Path, tmp_path: Path):
    (tmp_path / "served").mkdir()
    (tmp_path / "served/checkpoints").symlink_to(runs / "partly/checkpoints")
    plan = json.loads((runs / "partly/plan.json").read_text())
    plan["models"][1] |= {"endpoint": {"url": "http://localhost:8000/v1"}, "served": "big", "base": None}
    (tmp_path / "served/plan.json").write_text(json.dumps(plan))
    with pytest.raises(RunError, match=r"role 'echoer' is played by the server http://localhost:8000/v1"):
        export(str(tmp_path / "served"), tmp_path / "to", role="echoer")
    assert [f["roles"] for f in export(str(tmp_path / "served"), tmp_path / "to")["folders"]] == [["caller"]]


def test_a_folder_that_holds_something_is_left_alone(runs: Path, tmp_path: Path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(RunError, match="isn't an empty folder"):
        export(str(runs / "shared"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_run_without_a_checkpoint_or_a_plan_is_said(tmp_path: Path, runs: Path):
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    with pytest.raises(RunError, match="holds no checkpoint"):
        export(str(tmp_path / "empty"), tmp_path / "to")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/checkpoints").symlink_to(runs / "shared/checkpoints")
    with pytest.raises(RunError, match=r"bare holds no plan.json"):
        export(str(tmp_path / "bare"), tmp_path / "to")
