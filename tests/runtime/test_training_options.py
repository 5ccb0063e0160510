"""Options of an experiment followed from its file to the trainer, through whole runs of the toy team."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from masflow.compiler import compile_experiment
from masflow.models import saving
from masflow.models.experience import read_tokens
from masflow.runtime import checkpoints
from masflow.runtime.controller import train
from masflow.runtime.local import LocalActor
from masflow.runtime.model_group import ModelGroup
from masflow.runtime.rundir import Interrupted, StopFlag, read_metrics
from masflow.runtime.stream import Group
from masflow.runtime.team import Team
from masflow.runtime.worker import Worker

Toy = Callable[..., Path]
SHARED = "mapping: {models: {policy: {roles: rest}}}"
ADAPTERS = "mapping: {models: {policy: {roles: rest, train: lora, lora: {rank: 2}, adapters: per_role}}}"
GRPO = "algorithm: {use: grpo, samples: 4, updates_per_step: 2}"
WARM_START = "warm_start: {data: demos.jsonl, steps: 4, batch: 4, optimizer: {lr: 5.0e-3}}\n"


def steps(out: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(out / "metrics.jsonl") if record["kind"] == "train"]


def _worker(group: Group) -> Worker:
    assert isinstance(group, ModelGroup)
    [actor] = group.learners
    assert isinstance(actor, LocalActor)
    return actor.instance


def policies(out: Path, key: str) -> list[dict[str, float]]:
    """One metric of each policy that was updated, a dict a step."""
    return [{name: found[key] for name, found in record["policies"].items()} for record in steps(out)]


def saved(out: Path, file: str) -> dict[str, torch.Tensor]:
    last = checkpoints.latest(out / "checkpoints")
    assert last is not None
    return load_file(last / "models" / file)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rows(out: Path, query: str, *values: object) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(out / "trace.sqlite")) as db:
        return db.execute(query, values).fetchall()


@pytest.mark.parametrize(
    ("mapping", "files"),
    [(SHARED, ["policy/policy"]), (ADAPTERS, ["policy/policy.caller", "policy/policy.echoer"])],
)
def test_a_kl_penalty_reaches_every_policy_and_a_resumed_run_keeps_its_reference(
    toy: Toy, tmp_path: Path, mapping: str, files: list[str]
):
    kl = "algorithm: {use: grpo, samples: 4, kl: {weight: 0.5, estimator: k2}}"
    plan = compile_experiment(toy((SHARED, mapping), (GRPO, kl)))
    train(plan, tmp_path / "whole")
    found = policies(tmp_path / "whole", "kl_ref")
    # Every turn trains, advantage or not; before the first update nobody is away from the reference.
    assert all(len(step) == len(files) for step in found)
    assert max(found[0].values()) < 1e-6 and min(found[1].values()) > 1e-7
    for policy in found[-1]:
        assert found[-1][policy] > found[0][policy]

    stop = StopFlag()

    def ask_to_stop(kind: str, facts: dict[str, Any]) -> None:
        stop.requested = stop.requested or (kind == "train" and facts["step"] == 2)

    with pytest.raises(Interrupted):
        train(plan, tmp_path / "parts", on_event=ask_to_stop, stop=stop)
    train(plan, tmp_path / "parts", resume=True)
    assert policies(tmp_path / "parts", "kl_ref") == found
    for file in files:
        assert equal(
            saved(tmp_path / "parts", f"{file}.safetensors"), saved(tmp_path / "whole", f"{file}.safetensors")
        )


def test_an_entropy_bonus_reaches_the_trainer(toy: Toy, tmp_path: Path):
    for name, entropy in (("without", "0.0"), ("with", "2.0")):
        algorithm = f"algorithm: {{use: grpo, samples: 4, entropy: {entropy}}}"
        train(compile_experiment(toy((GRPO, algorithm))), tmp_path / name)
    without, bonus = (policies(tmp_path / name, "entropy") for name in ("without", "with"))
    assert without[0]["policy"] == pytest.approx(bonus[0]["policy"], rel=0.05)
    assert bonus[-1]["policy"] > without[-1]["policy"]


def test_return_to_go_pays_the_first_speaker_what_comes_later(toy: Toy, tmp_path: Path):
    workflow = (
        ("output:", "credit: return_to_go\ndiscount: 0.5\noutput:"),
        (
            '{name: echoed, use: "echo.py:echoed", otherwise: 0,',
            '{name: echoed, use: "echo.py:echoed", level: turn, nodes: [echo], otherwise: 0,',
        ),
    )
    train(compile_experiment(toy(workflow=workflow), overrides={"train.steps": "2"}), tmp_path / "run")
    totals = {
        (trajectory, role): total
        for trajectory, role, total in rows(
            tmp_path / "run", "SELECT trajectory, role, total FROM turns WHERE split = 'train'"
        )
    }
    paid = [(totals[t, "caller"], totals[t, "echoer"]) for t, role in totals if role == "echoer"]
    assert len(paid) == 24 and any(echoer for _, echoer in paid)
    assert all(caller == pytest.approx(0.5 * echoer) for caller, echoer in paid)
    advantages = rows(
        tmp_path / "run", "SELECT advantage FROM turns WHERE role = 'caller' AND split = 'train'"
    )
    assert any(advantage for (advantage,) in advantages)


def test_one_sample_a_task_learns_with_the_role_baseline(toy: Toy, tmp_path: Path):
    algorithm = "algorithm: {use: rloo, samples: 1, singleton: role_baseline}"
    train(compile_experiment(toy((GRPO, algorithm), (SHARED, SHARED))), tmp_path / "run")
    found = steps(tmp_path / "run")
    assert all(step["batch"]["singletons"] == step["batch"]["groups"] > 0 for step in found)
    assert any(step["batch"]["learnable_group_frac"] and step["policies"] for step in found)
    by_step: dict[int, dict[str, list[tuple[float, float]]]] = {}
    query = "SELECT step, role, total, advantage FROM turns WHERE split = 'train' AND advantage IS NOT NULL"
    for step, role, total, advantage in rows(tmp_path / "run", query):
        by_step.setdefault(step, {}).setdefault(role, []).append((total, advantage))
    assert by_step
    everything = "SELECT total FROM turns WHERE split = 'train' AND step = ? AND role = ?"
    for step, roles in by_step.items():
        for role, pairs in roles.items():
            totals = [total for (total,) in rows(tmp_path / "run", everything, step, role)]
            for total, advantage in pairs:
                others = (sum(totals) - total) / (len(totals) - 1)
                assert advantage == pytest.approx(total - others, abs=1e-6)


def test_mapping__no_stop_strings_or_temperature_an_agent__each_role_trains_on_its_own_distribution(
    toy: Toy, tmp_path: Path
):
    """Row of FIELD_PROBLEMS, Mapping: no per-agent stop strings or temperature, train and eval alike."""
    workflow = (
        (
            "caller: {prompt:",
            "caller: {sampling: {train: {temperature: 0.5}, eval: {temperature: 0.25}}, prompt:",
        ),
        ("echoer: {prompt:", "echoer: {sampling: {train: {temperature: 2.0, stop: [e]}}, prompt:"),
    )
    experiment = toy((GRPO, "algorithm: {use: grpo, samples: 4}"), workflow=workflow)
    out = tmp_path / "run"
    train(compile_experiment(experiment), out)
    used = rows(out, "SELECT DISTINCT split, role, temperature FROM turns ORDER BY 1, 2")
    assert used == [
        ("eval", "caller", 0.25),
        ("eval", "echoer", 0.0),
        ("train", "caller", 0.5),
        ("train", "echoer", 2.0),
    ]
    # One update a step: were logits divided by another temperature than in sampling, no ratio would be 1.
    assert all(step["policy"] == pytest.approx(1.0, abs=1e-4) for step in policies(out, "ratio"))
    said = rows(out, "SELECT text FROM turns WHERE role = 'echoer' AND split = 'train'")
    assert said and not any("e" in text for (text,) in said)
    assert any("e" in text for (text,) in rows(out, "SELECT text FROM turns WHERE role = 'caller'"))


def test_mapping__two_models_cannot_be_trained_at_once__each_has_its_own_learning_rate(
    toy: Toy, tmp_path: Path
):
    """Rows of FIELD_PROBLEMS, Mapping: one first-class policy; a model's own learning rate is ignored.

    And Grouping: K turns cost K optimizer steps, and the schedule ends K times too early. Here two optimizer
    steps a batch, over two turns an episode, are one tick.
    """
    own = "optimizer: {lr: 3.0e-3, warmup_steps: 2}"
    two = f"mapping: {{models: {{first: {{roles: [caller], {own}}}, second: {{roles: [echoer]}}}}}}"
    train(compile_experiment(toy((SHARED, two))), tmp_path / "run")
    rates = policies(tmp_path / "run", "lr")
    assert [step.get("second", 1e-2) for step in rates] == [1e-2] * 4
    wanted = [1.5e-3, 3e-3, 3e-3, 3e-3]
    assert [step.get("first", want) for step, want in zip(rates, wanted, strict=True)] == pytest.approx(
        wanted
    )
    assert {name for step in rates for name in step} == {"first", "second"}
    assert {n for step in policies(tmp_path / "run", "optimizer_steps") for n in step.values()} <= {1.0, 2.0}
    assert any(n == 2 for step in policies(tmp_path / "run", "optimizer_steps") for n in step.values())
    weights = [saved(tmp_path / "run", f"{name}/{name}.safetensors") for name in ("first", "second")]
    assert not equal(*weights)


def test_mapping__one_tokenizer_for_all_models__text_goes_between_roles_and_ids_within_one(
    toy: Toy, tmp_path: Path
):
    """Row of FIELD_PROBLEMS, Mapping: one tokenizer is assumed for all models."""
    config = "{model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,"
    config += " num_attention_heads: 2, max_position_embeddings: 64}"
    base = f"base: {{config: {config}, tokenizer: {{wordpiece: {{files: [other.jsonl]}}}}}}"
    mapping = f"mapping: {{models: {{first: {{roles: [caller]}}, second: {{roles: [echoer], {base}}}}}}}"
    experiment = toy((SHARED, mapping))
    text = json.dumps({"text": "hear brown grey pink black white blue green red and more"})
    (experiment.parent / "other.jsonl").write_text(text + "\n")
    out = tmp_path / "run"
    train(compile_experiment(experiment), out)
    said = dict(rows(out, "SELECT trajectory, text FROM turns WHERE role = 'caller' AND step = 4"))
    heard = rows(out, "SELECT trajectory, messages FROM turns WHERE role = 'echoer' AND step = 4")
    assert heard
    for trajectory, messages in heard:
        assert json.loads(messages)[0][1].strip() == f"hear {said[trajectory] or 'red'}"  # the default
    assert {name for step in steps(out) for name in step["policies"]} == {"first", "second"}
    assert all(value < 1e-3 for step in policies(out, "delivery_gap") for value in step.values())


def test_a_frozen_model_stands_still_bit_for_bit_through_a_whole_run(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mapping = "mapping: {models: {learner: {roles: [caller]}, still: {roles: [echoer], train: frozen}}}"
    plan = compile_experiment(toy((SHARED, mapping)))
    sums: list[dict[str, str]] = []
    close = Team.close

    def look_and_close(team: Team) -> None:
        models = {
            name: dict(_worker(group).base.model.named_parameters()) for name, group in team.groups.items()
        }
        sums.append({name: saving.checksum(weights) for name, weights in models.items()})
        close(team)

    monkeypatch.setattr(Team, "close", look_and_close)
    train(plan, tmp_path / "run")
    Team(plan, tmp_path / "run").close()  # reads the bases that the run began with
    after, before = sums
    assert after["still"] == before["still"] and after["learner"] != before["learner"]
    assert all(set(record["policies"]) <= {"learner"} for record in steps(tmp_path / "run"))
    assert any(record["policies"] for record in steps(tmp_path / "run"))


def test_one_model_of_a_mapping_may_start_from_a_step_of_an_earlier_run(toy: Toy, tmp_path: Path):
    train(compile_experiment(toy()), tmp_path / "first")
    mapping = (
        f"mapping: {{models: {{old: {{roles: [caller], init: {tmp_path}/first@2}}, new: {{roles: rest}}}}}}"
    )
    started = compile_experiment(toy((SHARED, mapping), (WARM_START, "")), overrides={"train.steps": "1"})
    train(started, tmp_path / "second")
    begun = tmp_path / "second/checkpoints/step_000000/models"
    earlier = load_file(tmp_path / "first/checkpoints/step_000002/models/policy/policy.safetensors")
    assert equal(load_file(begun / "old/old.safetensors"), earlier)
    assert not equal(load_file(begun / "new/new.safetensors"), earlier)


def test_silent__default_reward_0_on_an_exception__is_null_with_its_reason_in_the_trace(
    toy: Toy, tmp_path: Path
):
    """Row of FIELD_PROBLEMS, Silent failures: default reward 0, or 0 on an exception, teaches inaction."""
    experiment = toy()
    code = experiment.parent / "echo.py"
    fails = '    if answer == "red":\n        raise LookupError("no red today")\n    return'
    code.write_text(code.read_text().replace("    return", fails, 1))
    told: list[str] = []

    def listen(kind: str, facts: dict[str, Any]) -> None:
        if kind == "warning":
            told.append(facts["message"])

    train(compile_experiment(experiment), tmp_path / "run", on_event=listen)
    found = rows(tmp_path / "run", "SELECT task, failures, metrics FROM trajectories WHERE split = 'train'")
    red = [(failures, json.loads(metrics)) for task, failures, metrics in found if '"red"' in task]
    assert red and all("no red today" in failures and metrics["echoed"] is None for failures, metrics in red)
    query = "SELECT total, advantage FROM turns WHERE split = 'train' AND trajectory IN"
    query += " (SELECT id FROM trajectories WHERE failures != '[]')"
    assert set(rows(tmp_path / "run", query)) == {(None, None)}
    assert sum(step["unscored"] for step in steps(tmp_path / "run")) == len(red)
    assert any("no red today" in message for message in told)


@pytest.mark.parametrize(
    ("budget", "outcome", "experiment", "workflow"),
    [
        (
            "a turn's reply.max_tokens",
            "truncated",
            (),
            (
                (
                    'hear {{ call.text }}", reply: {max_tokens: 3}',
                    'hear {{ call.text }}", reply: {max_tokens: 1}',
                ),
            ),
        ),
        ("an episode's limits.tokens", "limit", (), (("output:", "limits: {tokens: 5}\noutput:"),)),
        (
            "a model's context",
            "prompt_too_long",
            ((SHARED, "mapping: {models: {policy: {roles: rest, context: 8}}}"),),
            (),
        ),
    ],
)
def test_silent__budgets_of_turn_trajectory_and_window_are_confused__each_has_its_own_name_and_outcome(
    toy: Toy, tmp_path: Path, budget: str, outcome: str, experiment: Any, workflow: Any
):
    """Row of FIELD_PROBLEMS, Silent failures: budgets are confused; later turns are cut and never trained."""
    changes = (*experiment, (WARM_START, ""), (GRPO, "algorithm: {use: grpo, samples: 4, entropy: 0.1}"))
    plan = compile_experiment(toy(*changes, workflow=workflow), overrides={"train.steps": "1"})
    train(plan, tmp_path / "run")
    [step] = steps(tmp_path / "run")
    ended = rows(tmp_path / "run", "SELECT DISTINCT outcome FROM trajectories WHERE split = 'train'")
    cut = rows(tmp_path / "run", "SELECT outcome FROM turns WHERE role = 'echoer' AND split = 'train'")
    # Prompt and reply of the caller take up to 7 tokens, so that only the echoer meets the budget.
    if outcome == "truncated":
        assert (outcome,) in cut and len(cut) == 12
    else:
        assert (outcome,) in ended and len(cut) < 12
    # What was said before the budget was met is trained in any case.
    assert step["batch"]["caller/trainable_turns"] == 12 and step["policies"]["policy"]["turns"] >= 12


def test_runtime__rollouts_are_serial__each_step_shows_how_many_replies_were_drawn_together(
    toy: Toy, tmp_path: Path
):
    """Row of FIELD_PROBLEMS, Runtime: parallelism defaults to 1 and rollouts are serial."""
    small = "engine: {use: transformers, max_batch_tokens: 40}"
    experiment = toy()
    train(compile_experiment(experiment, overrides={"train.steps": "1"}), tmp_path / "wide")
    narrow = toy(("eval: {samples: 1}", f"runtime: {{{small}}}\neval: {{samples: 1}}"))
    train(compile_experiment(narrow, overrides={"train.steps": "1"}), tmp_path / "narrow")
    # 3 tasks of 4 samples ask one turn each at a barrier: 12 together
    assert steps(tmp_path / "wide")[0]["concurrency"] == 12
    assert 1 < steps(tmp_path / "narrow")[0]["concurrency"] < 12


def test_token_tensors_stay_out_of_the_hub_and_its_bytes_are_told(toy: Toy, tmp_path: Path):
    """What goes through the hub is text and scalars: its size is the same whatever the model's is."""
    wide = ("hidden_size: 16, intermediate_size: 32", "hidden_size: 64, intermediate_size: 256")
    short, long = [], []
    for changes, sizes in ((), short), ((wide,), long):
        out = tmp_path / f"run{len(changes)}"
        train(compile_experiment(toy(*changes), overrides={"train.steps": "2"}), out)
        sizes += [step["hub_bytes"] for step in steps(out)]
        turn = rows(out, "SELECT id FROM turns WHERE split = 'train'")[0][0]
        assert read_tokens(out / "tokens/policy.sqlite", turn) is not None
    for a, b in zip(short, long, strict=True):
        assert 0 < b < 1.5 * a  # replies differ in length; 24 turns of 3 tokens
        assert max(a, b) / 24 < 1500


def test_what_the_display_says_of_a_step(toy: Toy, tmp_path: Path):
    from rich.console import Console

    from masflow.runtime.progress import Display, step_table

    out = tmp_path / "run"
    console = Console(record=True, width=160, force_terminal=False)
    with Display(2, 4, console) as display:
        train(compile_experiment(toy(), overrides={"train.steps": "2"}), out, on_event=display)
    console.print(step_table(steps(out)[-1]))
    text = console.export_text()
    for words in (
        "learnable",
        "tokens/s",
        "12 replies at once",
        "truncated",
        "malformed",
        "caller",
        "held out",
    ):
        assert words in text, words
