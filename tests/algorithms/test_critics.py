"""ppo, turn_ppo, ippo and mappo: what they refuse, and whole runs in which critics learn beside policies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from masflow.compiler import compile_experiment
from masflow.compiler.explain import explain
from masflow.compiler.plan import Plan
from masflow.errors import RunError, SpecError
from masflow.models.critic import Critic
from masflow.models.known import Known
from masflow.models.trainer import Trainer
from masflow.runtime import checkpoints
from masflow.runtime.controller import train
from masflow.runtime.rundir import Interrupted, StopFlag, read_metrics
from masflow.runtime.trial import evaluate_checkpoint

Toy = Callable[..., Path]
GRPO = "{use: grpo, samples: 4, updates_per_step: 2}"
TO_GO = ("name: echo\n", "name: echo\ncredit: return_to_go\n")
SHARED = "{policy: {roles: rest}}"
TWO = (SHARED, "{a: {roles: [caller]}, b: {roles: [echoer]}}")
ADAPTERS = (
    SHARED,
    "{policy: {train: lora, roles: rest, lora: {rank: 2}, adapters: per_role}}",
)


def plan_of(toy: Toy, algorithm: str, *changes: tuple[str, str], to_go: bool = True) -> Plan:
    workflow = (TO_GO,) if to_go else ()
    return compile_experiment(toy((GRPO, algorithm), *changes, workflow=workflow))


def steps(out: Path) -> list[dict[str, Any]]:
    found = read_metrics(out / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k != "time"} for r in found if r["kind"] == "train"]


# -- what a plan has ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "mapping", "critics"),
    [
        ("ppo", SHARED, [("policy", "policy", "caller echoer", False)]),
        ("ppo", TWO[1], [("a", "a", "caller", False), ("b", "b", "echoer", False)]),
        ("turn_ppo", ADAPTERS[1], [("policy", "policy", "caller echoer", False)]),
        ("ippo", SHARED, [("caller", "policy", "caller", False), ("echoer", "policy", "echoer", False)]),
        ("mappo", TWO[1], [("team", "a", "caller echoer", True)]),
    ],
)  # fmt: skip
def test_who_shares_a_critic(toy: Toy, algorithm: str, mapping: str, critics: list[tuple[str, ...]]):
    plan = plan_of(toy, algorithm, (SHARED, mapping))
    found = [(c.name, c.model, " ".join(c.roles), c.central) for c in plan.critics]
    assert found == critics


def test_a_frozen_role_has_no_value_head_and_a_plan_without_a_critic_has_none(toy: Toy):
    frozen = TWO[1].replace("roles: [echoer]", "roles: [echoer], train: frozen")
    plan = plan_of(toy, "ppo", (SHARED, frozen), to_go=False)
    assert [c.roles for c in plan.critics] == [("caller",)]
    assert compile_experiment(toy()).critics == ()


def test_the_digest_knows_the_critic(toy: Toy):
    digests = [
        plan_of(toy, text, to_go=False).digest
        for text in ("ppo", "{use: ppo, critic: {optimizer: {lr: 1.0e-3}}}", "{use: ppo, gae: {lam: 0.5}}")
    ]
    assert len(set(digests)) == 3


def test_explain_tells_who_values_whom(toy: Toy):
    plan = plan_of(toy, "mappo", TWO)
    told = explain(plan)
    assert "critic team, beside a: about 3.42k parameters" in told
    assert "values of caller, echoer" in told
    assert "each turn is compared with what its role's critic expected" in told
    (found,) = json.loads(explain(plan, "json"))["critics"]
    assert (found["name"], found["central"], found["num_parameters"]) == ("team", True, 3424)


# -- what is refused ------------------------------------------------------------------------------

REFUSED = [
    ("{use: ppo, advantage: group_norm, samples: 2}", "fixed-by-algorithm", "it is another algorithm"),
    ("{use: ppo, singleton: role_baseline}", "option-without-effect", "no turn needs others"),
    ("{use: ppo, negative_weight: 0.5}", "wrong-pair", "'gae' has one a token"),
    ("{use: ppo, kl: {weight: 0.1, place: reward}}", "wrong-pair", "have to foresee the penalty"),
    ("{use: ppo, critic: {per: team}}", "wrong-pair", "not single tokens"),
    ("{use: ppo, ratio: sequence}", "wrong-pair", "one ratio a turn"),
    ("{use: ppo, dynamic: {max_rounds: 3}}", "wrong-pair", "'gae' has no groups"),
    ("{use: turn_ppo, gae: {gamma: 0.9}}", "option-without-effect", "the workflow's 'discount' holds"),
    ("{use: ippo, critic: {per: model}}", "fixed-by-algorithm", "'per: role' is what makes ippo"),
    ("{use: mappo, critic: {per: role}}", "fixed-by-algorithm", "'per: team' is what makes mappo"),
    ("{use: grpo, samples: 2, critic: {per: role}}", "option-without-effect", "asks no critic"),
    ("{use: grpo, samples: 2, gae: {lam: 0.5}}", "option-without-effect", "asks no critic"),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "code", "why"), REFUSED)
def test_a_wrong_pair_is_refused_with_its_reason(toy: Toy, algorithm: str, code: str, why: str):
    with pytest.raises(SpecError) as caught:
        plan_of(toy, algorithm)
    assert [(p.code, why in p.message, bool(p.fix)) for p in caught.value.problems] == [(code, True, True)]


def test_node_sampling_and_a_critic_exclude_each_other(toy: Toy):
    with pytest.raises(SpecError, match="'node_sampling' compares actions drawn from one context"):
        plan_of(toy, "{use: ppo}\npasses: [node_sampling]", to_go=False)


def test_a_central_critic_needs_a_reward_of_the_whole_team(toy: Toy):
    workflow = (TO_GO, ("level: role, roles: [caller], weight: 0", "level: role, roles: [caller], weight: 1"))
    with pytest.raises(SpecError) as caught:
        compile_experiment(toy((GRPO, "mappo"), workflow=workflow))
    assert [p.code for p in caught.value.problems] == ["not-the-teams-reward"]
    compile_experiment(toy((GRPO, "ippo"), workflow=workflow))


def test_several_trainers_of_one_model_and_a_critic_exclude_each_other(toy: Toy):
    runtime = "runtime: {backend: ray, defaults: {placement: separate, trainer: {workers: 2}}}\nbase:"
    with pytest.raises(SpecError) as caught:
        plan_of(toy, "ppo", ("base:", runtime), to_go=False)
    assert [p.code for p in caught.value.problems] == ["critic-with-several-trainers"]


# -- runs -----------------------------------------------------------------------------------------

RATE = "critic: {optimizer: {lr: 1.0e-2}}"


SLOW = pytest.mark.slow
SHORT = ("steps: 4, tasks_per_step: 3, seed: 0, save_every: 1", "steps: 2, tasks_per_step: 3, seed: 0")
BEGUN = ("steps: 4, batch: 4", "steps: 1, batch: 4")
UNSEEN = ("data: {train: tasks.jsonl, eval: held_out.jsonl}", "data: {train: tasks.jsonl}")


@pytest.mark.parametrize(
    "use", [*(pytest.param(use, marks=SLOW) for use in ("ppo", "turn_ppo", "ippo")), "mappo"]
)
def test_critics_learn_beside_the_policies_over_several_optimizer_steps_a_batch(
    toy: Toy, tmp_path: Path, use: str
):
    plan = plan_of(toy, f"{{use: {use}, samples: 4, updates_per_step: 2, {RATE}}}", TWO, SHORT, BEGUN, UNSEEN)
    train(plan, tmp_path / "run")
    found = steps(tmp_path / "run")
    names = {"mappo": ["team"], "ippo": ["caller", "echoer"]}.get(use, ["a", "b"])
    for record in found:
        assert list(record["critics"]) == names
        assert all(m["optimizer_steps"] == 4 for m in record["critics"].values())
        for metrics in record["policies"].values():
            assert metrics["optimizer_steps"] == 4
            assert metrics["ratio"] != pytest.approx(1.0, abs=1e-6)
    first, second = (found[i]["critics"][names[0]]["value_mean"] for i in (0, 1))
    assert first == 0.0
    assert second != 0.0
    wanted = {"ppo": found[0]["policies"]["a"]["tokens"], "mappo": 24}.get(use, 12)
    assert found[0]["critics"][names[0]]["values"] == wanted


def test_what_policies_are_trained_on_are_the_critics_whitened_advantages(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Recorded inside the run, worked out again from the recorded values: the sum of the paper, by token."""
    seen: list[tuple[Any, ...]] = []
    known: list[dict[str, Any]] = []
    estimate, minibatch = Critic.estimate, Trainer._minibatch

    def recorded(self: Critic, links: Any, *rest: Any) -> Any:
        found = estimate(self, links, *rest)
        seen.append((links, found.old))
        return found

    def spied(self: Trainer, learner: Any, items: Any, rows: Any, told: Known, *rest: Any) -> Any:
        known.append(dict(told.advantages))
        return minibatch(self, learner, items, rows, told, *rest)

    monkeypatch.setattr(Critic, "estimate", recorded)
    monkeypatch.setattr(Trainer, "_minibatch", spied)
    text = f"{{use: ppo, samples: 4, updates_per_step: 2, gae: {{gamma: 0.9, lam: 0.8}}, {RATE}}}"
    train(plan_of(toy, text, SHORT, BEGUN, UNSEEN, to_go=False), tmp_path / "run")
    assert len(seen) == 2
    assert len(known) == 8
    for step, (links, old) in enumerate(seen):
        raw: dict[str, list[float]] = {}
        for link, values in zip(links, old, strict=True):
            after = [*values[1:], 0.0]
            deltas = [0.9 * after[t] - v for t, v in enumerate(values)]
            deltas[-1] += link.reward
            size = len(deltas)
            raw[link.turn_id] = [sum(0.72**k * deltas[t + k] for k in range(size - t)) for t in range(size)]
        for role in ("caller", "echoer"):
            mine = [link.turn_id for link in links if link.role == role]
            every = np.concatenate([raw[i] for i in mine])
            for i in mine:
                wanted = (np.array(raw[i]) - every.mean()) / every.std(ddof=1)
                for used in known[4 * step : 4 * step + 4]:
                    assert used[i] == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert any(np.abs(values).max() > 0 for values in seen[1][1])


@SLOW
def test_in_a_warmup_critics_learn_and_policies_stay_bit_for_bit(toy: Toy, tmp_path: Path):
    text = "{use: ppo, samples: 4, critic: {warmup_steps: 2, optimizer: {lr: 1.0e-2}}}"
    train(plan_of(toy, text, to_go=False), tmp_path / "run")
    found = steps(tmp_path / "run")
    assert [sorted(r["policies"]) for r in found] == [[], [], ["policy"], ["policy"]]
    assert all(r["critics"]["policy"]["optimizer_steps"] == 2 for r in found)

    def weights(step: int, name: str) -> dict[str, torch.Tensor]:
        return load_file(tmp_path / f"run/checkpoints/step_{step:06d}/models/policy/{name}.safetensors")

    assert all(torch.equal(w, weights(2, "policy")[n]) for n, w in weights(0, "policy").items())
    assert not all(torch.equal(w, weights(3, "policy")[n]) for n, w in weights(0, "policy").items())
    before, after = weights(0, "critics/policy"), weights(2, "critics/policy")
    assert not any(torch.equal(w, after[n]) for n, w in before.items() if n.startswith("value_head"))


def test_a_critic_begins_from_the_warm_started_model(toy: Toy, tmp_path: Path):
    train(plan_of(toy, "ppo", SHORT, UNSEEN, to_go=False), tmp_path / "run")
    place = tmp_path / "run/checkpoints/step_000000/models/policy"
    policy, critic = load_file(place / "policy.safetensors"), load_file(place / "critics/policy.safetensors")
    body = {name: weight for name, weight in critic.items() if not name.startswith("value_head")}
    assert body
    assert all(torch.equal(weight, policy[f"model.{name}"]) for name, weight in body.items())


@pytest.mark.parametrize(
    ("use", "mapping"),
    [
        ("mappo", TWO[1]),
        pytest.param("ppo", TWO[1], marks=SLOW),
        pytest.param("ppo", ADAPTERS[1], marks=SLOW),
        pytest.param("turn_ppo", ADAPTERS[1], marks=SLOW),
    ],
)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(toy: Toy, tmp_path: Path, use: str, mapping: str):
    text = f"{{use: {use}, samples: 2, updates_per_step: 2, {RATE}}}"
    plan = plan_of(toy, text, (SHARED, mapping), SHORT, BEGUN, UNSEEN)
    train(plan, tmp_path / "whole")
    stop = StopFlag()

    def after_two(kind: str, facts: dict[str, Any]) -> None:
        stop.requested = stop.requested or (kind == "train" and facts["step"] == 1)

    with pytest.raises(Interrupted):
        train(plan, tmp_path / "halves", on_event=after_two, stop=stop)
    train(plan, tmp_path / "halves", resume=True)
    assert steps(tmp_path / "whole") == steps(tmp_path / "halves")
    files = sorted((tmp_path / "whole/checkpoints/step_000002").rglob("critics/*"))
    assert {f.suffix for f in files} == {".json", ".pt", ".safetensors"}
    for file in (f for f in files if f.suffix == ".safetensors"):
        theirs = load_file(str(file).replace("/whole/", "/halves/"))
        assert all(torch.equal(w, theirs[n]) for n, w in load_file(file).items())


@SLOW
def test_a_checkpoint_without_its_critic_can_be_scored_and_not_resumed(toy: Toy, tmp_path: Path):
    plan = plan_of(toy, "ppo", ("steps: 4, tasks", "steps: 1, tasks"), to_go=False)
    train(plan, tmp_path / "run")
    place = checkpoints.latest(tmp_path / "run/checkpoints")
    assert place is not None
    (place / "models/policy/critics/policy.safetensors").unlink()
    longer = plan_of(toy, "ppo", ("steps: 4, tasks", "steps: 2, tasks"), to_go=False)
    scored = evaluate_checkpoint(plan, str(tmp_path / "run"), "eval", 2, 0)
    assert scored["metrics"].keys() == {"echoed", "called"}
    with pytest.raises(RunError, match=r"policy\.safetensors is missing"):
        train(longer, tmp_path / "run", resume=True)


def test_nothing_to_learn_leaves_the_policy_where_it_is(toy: Toy, tmp_path: Path):
    """Every reward is 0 and so is every value: no rows, no optimizer step; the critic has nothing to move."""
    flat = ('- {name: echoed, use: "echo.py:echoed",', '- {name: echoed, use: "echo.py:nothing",')
    path = toy((GRPO, "{use: ppo, samples: 2}"), ("steps: 4, tasks", "steps: 1, tasks"), workflow=(flat,))
    with (path.parent / "echo.py").open("a") as file:
        file.write("\ndef nothing(said: str, answer: str) -> float:\n    return 0.0\n")
    train(compile_experiment(path), tmp_path / "run")
    (record,) = steps(tmp_path / "run")
    assert record["policies"] == {}
    assert record["critics"]["policy"]["value_loss"] == 0.0
    assert record["batch"]["learnable_group_frac"] == 0.0
