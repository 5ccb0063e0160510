"""Frozen opponents from earlier runs: they play as they were left, and stand still while others learn."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from masflow.compiler import check, compile_experiment
from masflow.errors import RunError, SpecError
from masflow.models.bases import load_base
from masflow.models.policies import Policies
from masflow.runtime import checkpoints
from masflow.runtime.controller import train
from masflow.runtime.rundir import Interrupted, StopFlag, read_metrics

Toy = Callable[..., Path]
SHARED = "mapping: {models: {policy: {roles: rest}}}"
ADAPTERS = "mapping: {models: {policy: {roles: rest, train: lora, lora: {rank: 2}, adapters: per_role}}}"
TWO_STEPS = ("steps: 4, tasks", "steps: 2, tasks")


def against(run: str) -> tuple[str, str]:
    """The change by which the caller learns beside a frozen echoer out of an earlier run."""
    wolves = f'wolves: {{roles: [echoer], init: "{run}", train: frozen}}'
    return SHARED, f"mapping: {{models: {{mine: {{roles: [caller]}}, {wolves}}}}}"


@pytest.fixture(scope="module")
def root(toy_at: Toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`day1` (one full model) and `adapters` (one a role), two steps each, beside the project in `toy`."""
    root = tmp_path_factory.mktemp("league")
    for name, mapping in (("day1", SHARED), ("adapters", ADAPTERS)):
        train(
            compile_experiment(toy_at(root / "toy", (SHARED, mapping), TWO_STEPS)), root / "toy/runs" / name
        )
    return root / "toy"


def weights(run: Path, file: str, step: int = 2) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step_{step:06d}/models" / file)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def test_a_role_learns_against_a_frozen_one_of_an_earlier_run_that_never_moves(
    root: Path, toy_at: Toy, tmp_path: Path
):
    plan = compile_experiment(toy_at(root, against("runs/day1@1"), TWO_STEPS))
    assert plan.model("wolves").policies[0].init == str(root / "runs/day1/checkpoints/step_000001")
    train(plan, tmp_path / "run")
    left = weights(root / "runs/day1", "policy/policy.safetensors", step=1)
    assert not same(left, weights(root / "runs/day1", "policy/policy.safetensors"))
    for step in (0, 2):
        assert same(weights(tmp_path / "run", "wolves/wolves.safetensors", step), left)
    assert not same(*(weights(tmp_path / "run", "mine/mine.safetensors", step) for step in (0, 2)))
    last = [r for r in read_metrics(tmp_path / "run/metrics.jsonl") if r["kind"] == "train"][-1]
    assert set(last["policies"]) == {"mine"} and set(last["roles"]) == {"caller", "echoer"}
    assert last["roles"]["echoer"]["turns"] == 12


def test_a_frozen_opponent_may_have_been_an_adapter(root: Path, toy_at: Toy, tmp_path: Path):
    earlier = compile_experiment(toy_at(root, (SHARED, ADAPTERS), TWO_STEPS))
    plan = compile_experiment(toy_at(root, against("runs/adapters@last"), TWO_STEPS))
    train(plan, tmp_path / "run")
    assert same(*(weights(tmp_path / "run", "wolves/wolves.safetensors", step) for step in (0, 2)))

    def logits(plan: Any, model: str, run: Path, policy: str) -> torch.Tensor:
        loaded = Policies(plan.model(model), load_base(plan.model(model), run, plan.train.seed), 0)
        loaded.load(run / "checkpoints/step_000002/models" / model)
        loaded.switch(policy)
        with torch.no_grad():
            return loaded.base.model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits.clone()

    played = logits(plan, "wolves", tmp_path / "run", "wolves")
    echoer = logits(earlier, "policy", root / "runs/adapters", "policy/echoer")
    caller = logits(earlier, "policy", root / "runs/adapters", "policy/caller")
    assert (played - echoer).abs().max() < 1e-6 < 1e-4 < (played - caller).abs().max()


def test_another_opponent_is_another_plan_and_a_resume_with_it_is_refused(
    root: Path, toy_at: Toy, tmp_path: Path
):
    stop = StopFlag()

    def ask_to_stop(kind: str, facts: dict[str, Any]) -> None:
        stop.requested = stop.requested or kind == "train"

    plan = compile_experiment(toy_at(root, against("runs/day1@1"), TWO_STEPS))
    with pytest.raises(Interrupted):
        train(plan, tmp_path / "run", on_event=ask_to_stop, stop=stop)
    other = compile_experiment(toy_at(root, against("runs/day1@2"), TWO_STEPS))
    assert other.digest != plan.digest
    with pytest.raises(RunError, match=r"another plan.*\n.*the weights that 'wolves' starts from"):
        train(other, tmp_path / "run", resume=True)
    # The same weights at another place are the same opponent.
    shutil.copytree(root / "runs/day1", root / "runs/renamed", dirs_exist_ok=True)
    moved = compile_experiment(toy_at(root, against("runs/renamed@1"), TWO_STEPS))
    assert moved.digest == plan.digest
    assert train(moved, tmp_path / "run", resume=True)["steps"] == 2


def test_a_noted_hash_is_that_of_the_weights(root: Path):
    from masflow.compiler.runs import HASHES, weights_hash

    place = root / "runs/day1/checkpoints/step_000002"
    noted = weights_hash(place)
    text = (place / HASHES).read_text()
    (place / HASHES).unlink()
    assert weights_hash(place) == noted == json.loads(text)["sha256"]
    (place / HASHES).write_text(text)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("hidden_size: 16", "hidden_size: 32"), "hidden_size 16 there, 32 here"),
        (("files: [words.jsonl]", "files: [other.jsonl]"), "its tokenizer was made from other files"),
    ],
)
@pytest.mark.parametrize("run", ["day1", "adapters"])
def test_an_opponent_on_another_base_is_refused_when_the_file_is_checked(
    root: Path, toy_at: Toy, change: tuple[str, str], reason: str, run: str
):
    experiment = toy_at(root, against(f"runs/{run}"), change)
    (root / "other.jsonl").write_text('{"text": "say hear red"}\n')
    [problem] = [p for p in check(experiment) if not p.code.startswith("warn-")]
    assert problem.code == "other-base" and reason in problem.message
    assert problem.line and "wolves" in problem.path


@pytest.mark.parametrize(("run", "codes"), [("day1", ["not-an-adapter"]), ("adapters", [])])
def test_an_adapters_own_start_is_an_adapter(root: Path, toy_at: Toy, run: str, codes: list[str]):
    groups = f"{{echo: {{roles: [echoer], init: runs/{run}}}, other: rest}}"
    model = f"{{roles: rest, train: lora, lora: {{rank: 2}}, adapters: {groups}}}"
    own = f"mapping: {{models: {{policy: {model}}}}}"
    found = [p for p in check(toy_at(root, (SHARED, own))) if not p.code.startswith("warn-")]
    assert [p.code for p in found] == codes
    for problem in found:
        assert problem.path.endswith("adapters.echo.init") and "write 'init' at the model" in problem.fix


def test_adapters_on_a_base_that_stays_are_refused_on_another(root: Path, toy_at: Toy, tmp_path: Path):
    run = tmp_path / "hub"
    shutil.copytree(root / "runs/adapters", run)
    plan = json.loads((run / "plan.json").read_text())
    plan["models"][0] |= {"base": "some/base", "base_hash": "x"}
    (run / "plan.json").write_text(json.dumps(plan))
    for file in run.glob("checkpoints/*/models/policy/model.json"):
        facts = json.loads(file.read_text())
        facts["changed"].remove("(backbone)")
        file.write_text(json.dumps(facts))
    with pytest.raises(SpecError, match="its adapters belong on some/base"):
        compile_experiment(toy_at(root, against(str(run))))


def test_the_best_and_the_last_checkpoint_may_be_named(root: Path, toy_at: Toy):
    last = checkpoints.latest(root / "runs/day1/checkpoints")
    assert last is not None
    best = checkpoints.best_step(checkpoints.read_state(last), last.parent)
    for word, step in (("best", best), ("last", 2)):
        plan = compile_experiment(toy_at(root, against(f"runs/day1@{word}")))
        assert plan.model("wolves").policies[0].init == str(last.with_name(f"step_{step:06d}"))
    with pytest.raises(SpecError, match="kept: step_000000, step_000001, step_000002"):
        compile_experiment(toy_at(root, against("runs/day1@worst")))
