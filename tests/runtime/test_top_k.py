"""Teams that train on the groups of largest benefit: which are found, who moves, what is reported."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from masflow.compiler import compile_experiment
from masflow.compiler.explain import explain
from masflow.compiler.plan import Plan
from masflow.errors import SpecError
from masflow.models.scripted import ScriptedEngine
from masflow.rl.selection import choose
from masflow.runtime.controller import train
from masflow.runtime.rundir import Interrupted, StopFlag
from tests.runtime.test_nodes import drawn, learnt, sampling
from tests.runtime.test_nodes_trained import FEWER, SHORT, records

Compile = Callable[..., Plan]
Toy = Callable[..., Path]
NODES = "node_sampling: {samples: 3}"
APART = (
    "mapping: {models: {policy: {roles: rest}}}",
    "mapping: {models: {first: {roles: [caller]}, second: {roles: [echoer]}}}",
)
ADAPTED = (
    "mapping: {models: {policy: {roles: rest}}}",
    "mapping: {models: {policy: {roles: rest, train: lora, lora: {rank: 2, alpha: 4},"
    " adapters: {first: [caller], second: [echoer]}}}}",
)
DECISIVE = """
    name: decisive
    roles: {a: {prompt: "speak {{ visit }}"}}
    nodes: {n0: {role: a}, n1: {role: a}, n2: {role: a}, n3: {role: a}, n4: {role: a}}
    edges: [start -> n0 -> n1 -> n2 -> n3 -> n4 -> end]
    rewards:
      - {name: paid, use: "table.py:paid", args: {first: "{{ n0.text }}", key: "{{ n3.text }}"}}
"""
PAID = """
def paid(first, key):
    return 0.2 * float(first) + float(key)
"""


def written(toy: Toy, *passes: str, change: tuple[str, str] = FEWER, more: Any = ()) -> Path:
    file = toy(*SHORT, change, *more)
    file.write_text(file.read_text() + f"passes: [{', '.join(passes)}]\n")
    return file


def test_the_decisive_node_is_found_and_plain_variance_takes_an_early_one(compiled: Compile):
    # n3 decides (variance 1/4), n0 adds 0.2 (1/100), the others nothing. What is left to chance behind n0 is
    # all of that, so that one continuation shows 0.26 there, and no less at n1 and n2 than at n3.
    engine = ScriptedEngine({"*": lambda r: str(int(random.Random(r.seed).random() < 0.5))})
    taken = {}
    for corrected, continuations in ((True, 4), (False, 1)):
        plan = sampling(
            compiled(DECISIVE, {"table.py": PAID}), samples=8, continuations=continuations, max_nodes=None
        )
        credited, batch = learnt(plan, drawn(plan, engine.generate, 60), 60)
        found = choose(batch.groups, credited.entrants, 1, corrected=corrected)
        taken[corrected] = Counter(one.node for one in found if one.selected)
        means = {n: [o.benefit for o in found if o.node == n] for n in ("n0", "n3")}
        if corrected:
            averages = {n: sum(v for v in each if v is not None) / len(each) for n, each in means.items()}
            assert averages == {"n0": pytest.approx(0.01, abs=0.015), "n3": pytest.approx(0.25, abs=0.03)}
            # the same draws: at n1, which decides nothing, luck is worth 0.25 / 4 without the correction
            lucky = choose(batch.groups, credited.entrants, 1, corrected=False)
            early = [[o.benefit or 0.0 for o in all_ if o.node == "n1"] for all_ in (found, lucky)]
            assert [sum(each) / len(each) for each in early] == pytest.approx([0.0, 0.0625], abs=0.015)
    assert taken[True]["n3"] >= 54
    assert taken[False]["n3"] < 20 and taken[False]["n0"] + taken[False]["n1"] + taken[False]["n2"] > 40


@pytest.mark.parametrize("change", [APART, ADAPTED])
def test_policies_without_a_selected_group_do_not_move_bit_for_bit(
    toy: Toy, tmp_path: Path, change: tuple[str, str]
):
    longer = ("steps: 2, tasks", "steps: 6, tasks")
    file = written(toy, NODES, "top_k: {k: 1, scope: batch}", more=(change, longer))
    train(compile_experiment(file), tmp_path / "run")
    still = 0
    for record in records(tmp_path / "run"):
        if record["kind"] != "train":
            continue
        files = [weights_and_optimizers(tmp_path / "run", record["step"] - before) for before in (1, 0)]
        moved = {name for name in ("first", "second") if of(files[0], name) != of(files[1], name)}
        chosen = record["selection"]["roles"]
        names = {"caller": "first", "echoer": "second"}
        assert moved == {names[role] for role, found in chosen.items() if found["selected"]}
        assert {name.rpartition("/")[2] for name in record["policies"]} == moved
        resting = {"first", "second"} - moved
        still += sum(any("optimizer" in name for name in of(files[1], policy)) for policy in resting)
    assert still  # one that had learned before, too


def weights_and_optimizers(run: Path, step: int) -> dict[str, str]:
    root = run / f"checkpoints/step_{step:06d}/models"
    files = {str(f.relative_to(root)): f for f in root.rglob("*") if f.is_file()}
    return {name: sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


def of(files: dict[str, str], policy: str) -> dict[str, str]:
    """Its weights, and the state of its optimizer once it has taken a step."""
    kinds = (f"{policy}.safetensors", f"{policy}.optimizer.pt")
    found = {name: digest for name, digest in files.items() if name.endswith(kinds)}
    assert found, files
    return found


def test_what_is_selected_is_reported_and_a_resumed_run_selects_the_same(toy: Toy, tmp_path: Path):
    plan = compile_experiment(written(toy, NODES, "top_k: {k: 1}"))
    stop = StopFlag()

    def ask_to_stop(kind: str, facts: dict[str, Any]) -> None:
        stop.requested = stop.requested or (kind == "train" and facts["step"] == 1)

    with pytest.raises(Interrupted):
        train(plan, tmp_path / "run", on_event=ask_to_stop, stop=stop)
    train(plan, tmp_path / "run", resume=True)
    train(plan, tmp_path / "whole")
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    record = next(r for r in records(tmp_path / "run") if r["kind"] == "train")
    told = record["selection"]
    assert told["groups"] == record["batch"]["groups"] == 6 and 1 <= told["selected"] <= 3
    assert told["selected"] == sum(r["selected"] for r in told["roles"].values())
    assert told["selected"] == sum(n["selected"] for n in told["nodes"].values())
    assert set(told["nodes"]) == {"call", "echo"} and set(told["roles"]) == {"caller", "echoer"}
    assert 0 < told["trained_tokens"] < told["all_tokens"]
    assert record["episodes"] == 9  # E: tasks x siblings, whatever is selected


@pytest.mark.parametrize("use", ["grpo", "dr_mas", "matpo"])
def test_groups_of_whole_episodes_can_be_chosen_from_too(toy: Toy, tmp_path: Path, use: str):
    group = ("use: grpo, samples: 4, updates_per_step: 2", f"use: {use}, samples: 4, updates_per_step: 1")
    train(compile_experiment(written(toy, "top_k: {k: 0.5, scope: batch}", change=group)), tmp_path / "run")
    record = next(r for r in records(tmp_path / "run") if r["kind"] == "train")
    told = record["selection"]
    assert told["groups"] == (3 if use == "matpo" else 6) and 1 <= told["selected"] <= told["groups"] // 2 + 1
    assert 0 < told["trained_tokens"] < told["all_tokens"]


def test_two_continuations_unless_one_is_asked_for(toy: Toy):
    for nodes, number in ((NODES, 2), ("node_sampling: {samples: 3, continuations: 1}", 1)):
        plan = compile_experiment(written(toy, nodes, "top_k: {k: 5}"))
        assert plan.sampler.options["continuations"] == number
        stage = next(s for s in plan.stages if s.name == "select")
        assert (stage.op, stage.options["corrected"]) == ("top_k", number > 1)
        said = "less what the luck of later turns adds" if number > 1 else "(luck included)"
        assert "top_k: trains the 5 groups of each task" in explain(plan) and said in explain(plan)
    local = (("level: role, roles: [caller], weight: 0", "level: turn, roles: [caller]"),)
    file = toy(*SHORT, FEWER, workflow=local)
    file.write_text(file.read_text() + "passes: [node_sampling: {samples: 3, credit: local}, top_k: {}]\n")
    assert compile_experiment(file).sampler.options["continuations"] == 1


@pytest.mark.parametrize(
    ("passes", "change", "code", "said"),
    [
        (("top_k: {k: 0}",), FEWER, "pass-setting", "a share of them below 1, or all"),
        (("top_k: {k: 1.5}",), FEWER, "pass-setting", "a share of them below 1, or all"),
        (("top_k: {k: true}",), FEWER, "pass-setting", "a share of them below 1, or all"),
        (("top_k: {k: most}",), FEWER, "pass-setting", "a share of them below 1, or all"),
        (("top_k: {scope: episode}",), FEWER, "pass-setting", "known: task, batch"),
        (("top_k: {}", NODES), FEWER, "pass-order", "wrong side of 'node_sampling'"),
        (("top_k: {}", "top_k: {}"), FEWER, "pass-twice", "written twice"),
        (("top_k: {}",), ("use: grpo,", "use: reinforce_pp,"), "wrong-pair", "'batch_norm' has no groups"),
        (("top_k: {}",), ("use: grpo,", "use: gigpo,"), "wrong-pair", "compares each turn twice"),
        (("top_k: {}",), ("use: grpo,", "use: dapo,"), "wrong-pair", "'top_k' both say which groups"),
    ],
)
def test_what_cannot_be_is_refused(
    toy: Toy, passes: tuple[str, ...], change: tuple[str, str], code: str, said: str
):
    with pytest.raises(SpecError) as caught:
        compile_experiment(written(toy, *passes, change=change))
    problems = [p for p in caught.value.problems if p.code == code]
    assert any(said in p.message for p in problems), caught.value.problems
    assert all(p.line > 0 for p in problems)
