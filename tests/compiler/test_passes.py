"""Passes are found by name, checked for their order, applied in turn, and what they changed is told."""

from dataclasses import replace
from typing import ClassVar

import pytest

from masflow import passes
from masflow.compiler import compile_experiment
from masflow.compiler.explain import explain
from masflow.compiler.graph import END, Arrow, Node
from masflow.compiler.plan import Plan
from masflow.errors import SpecError
from masflow.spec.base import Spec


class Fewer(Spec):
    """Draws fewer samples."""

    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()
    samples: int = 2

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, sampler=replace(plan.sampler, samples=self.samples))


class Last(Fewer):
    """Stands after the other one."""

    after: ClassVar[tuple[str, ...]] = ("fewer",)

    def apply(self, plan: Plan) -> Plan:
        return replace(plan, sampler=replace(plan.sampler, kind="last"))


class Breaking(Fewer):
    """Adds a node that no edge reaches."""

    def apply(self, plan: Plan) -> Plan:
        lost = Node("lost", "set", (Arrow((END,)),))
        graph = replace(plan.graph, nodes=(*plan.graph.nodes, lost))
        return replace(plan, workflows={**plan.workflows, plan.root: graph})


@pytest.fixture
def plan_of(project, tiny, monkeypatch):
    monkeypatch.setitem(passes.BUILT_IN, "fewer", Fewer)
    monkeypatch.setitem(passes.BUILT_IN, "last", Last)
    monkeypatch.setitem(passes.BUILT_IN, "breaking", Breaking)
    return lambda text: compile_experiment(
        project({**tiny, "tiny.yaml": tiny["tiny.yaml"] + f"passes: {text}\n"})
    )


def test_passes_are_applied_in_order_and_told_with_their_changes(plan_of):
    plan = plan_of("[fewer: {samples: 3}, last]")
    assert (plan.sampler.samples, plan.sampler.kind) == (3, "last")
    assert [(p["name"], p["changes"]) for p in plan.passes] == [
        ("fewer", ["sampler.samples: 8 -> 3"]),
        ("last", ['sampler.kind: "trajectories" -> "last"']),
    ]
    assert "fewer (samples: 3)\n    sampler.samples: 8 -> 3" in explain(plan, passes=True)


def test_a_pass_changes_the_digest(plan_of):
    assert plan_of("[fewer]").digest != plan_of("[]").digest


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("[last, fewer]", "pass-order", "swap the two"),
        ("[breaking]", "unreachable-node", "no path leads from start to 'lost'"),
        ("[fewr]", "unknown-pass", "write 'fewer'"),
        ("[fewer: {sample: 3}]", "pass-setting", "sample"),
        ("[fewer: {samples: many}]", "pass-setting", "'samples' must be a whole number; got 'many'"),
        ("[fewer, fewer: {samples: 3}]", "pass-twice", "remove one of the two"),
    ],
)
def test_what_is_wrong_with_a_pass_is_said(plan_of, text, code, said):
    with pytest.raises(SpecError) as caught:
        plan_of(text)
    assert [p.code for p in caught.value.problems] == [code]
    assert said in str(caught.value)


def test_every_wrong_setting_of_a_pass_is_said_on_its_line_with_what_is_known(plan_of):
    with pytest.raises(SpecError) as caught:
        plan_of("\n- node_sampling:\n    samples: 1\n    credit: rollouts\n    max_node: 2")
    found = {p.path: p for p in caught.value.problems}
    credit, samples, key = (found[f"passes.0.node_sampling.{k}"] for k in ("credit", "samples", "max_node"))
    assert "unknown credit 'rollouts'; known: rollout, splice, fixed_suffix, local" in credit.message
    assert credit.fix == "write 'rollout'"
    assert "'samples' is 1; it must be at least 2" in samples.message
    assert key.fix == "write 'max_nodes'"
    assert samples.line + 2 == credit.line + 1 == key.line
