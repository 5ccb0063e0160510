"""Prefix sharing is decided and told from the plan, changes no digest, and can be switched off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from masflow.compiler import compile_experiment
from masflow.compiler.explain import explain
from masflow.compiler.plan import Plan

TEXT = "x" * 392 + "Answer: "
"""400 characters, 100 tokens as the estimate counts them."""
WORKFLOW = f"""
name: one
task: {{question: str}}
roles:
  speaker: {{prompt: "{TEXT}{{{{ question }}}}", conversation: role, reply: {{tag: a, max_tokens: 50}}}}
nodes: {{speak: {{role: speaker}}}}
edges: [start -> speak, speak -> end]
rewards: [{{name: form, use: well_formed, level: turn}}]
"""
LOOP = "edges: [start -> speak, speak -> speak when visits.speak < 3, speak -> end]"


@pytest.fixture
def plan_of(project: Callable[..., Path], tiny: dict[str, str]) -> Callable[..., Plan]:
    def make(passes: str = "", workflow: str = WORKFLOW, base: str = "some/base") -> Plan:
        experiment = tiny["tiny.yaml"].replace("some/base", base) + passes
        return compile_experiment(project({**tiny, "tiny.yaml": experiment, "workflow.yaml": workflow}))

    return make


def test_the_saving_is_estimated_from_samples_prompts_and_replies(plan_of: Callable[..., Plan]) -> None:
    # Eight samples of a prompt of 100 tokens with replies of 50: 8 · 150 one by one, 100 + 8 · 50 shared.
    (entry,) = plan_of().sharing
    assert (entry.model, entry.shares, entry.rows_tokens, entry.computed_tokens) == (
        "policy",
        True,
        1200,
        500,
    )


def test_a_conversation_shares_its_history_too(plan_of: Callable[..., Plan]) -> None:
    # Three turns: 150, 300 and 450 tokens in each of eight episodes; shared, the last holds the others.
    loop = WORKFLOW.replace("edges: [start -> speak, speak -> end]", LOOP).replace(
        "{speak: {role: speaker}}", "{speak: {role: speaker, limits: {visits: 3}}}"
    )
    (entry,) = plan_of(workflow=loop).sharing
    assert (entry.rows_tokens, entry.computed_tokens) == (8 * 900, 100 + 8 * 350)


def test_it_is_told_in_words_and_to_machines(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of()
    assert "prefix sharing of policy on: what rows begin with is computed once" in explain(plan)
    assert "7 of 8 tokens are saved, about 500 of 1200 tokens a task" in explain(plan)
    told = json.loads(explain(plan, "json"))["prefix_sharing"]
    assert [(e["model"], e["shares"], e["computed_tokens"]) for e in told] == [("policy", True, 500)]
    assert plan.passes == ()  # it stands there only where it is named


def test_it_is_switched_off_without_another_digest(plan_of: Callable[..., Plan]) -> None:
    off = plan_of("passes: [prefix_sharing: {enabled: false}]\n")
    assert not off.shares_prefixes("policy") and plan_of().shares_prefixes("policy")
    assert "prefix sharing of policy off: switched off" in explain(off)
    assert [entry["name"] for entry in off.passes] == ["prefix_sharing"]
    assert off.digest == plan_of("passes: [prefix_sharing]\n").digest == plan_of().digest


def test_a_model_that_looks_back_a_window_says_what_is_taken_one_by_one(
    plan_of: Callable[..., Plan], tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = {"model_type": "mistral", "sliding_window": 64, "vocab_size": 99, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    (entry,) = plan_of(base=str(folder)).sharing
    assert entry.shares and "rows of more than 64 tokens one by one" in entry.why
