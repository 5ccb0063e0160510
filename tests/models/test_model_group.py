"""A model group from outside: text and scalars in and out, exact saves, independent policies."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from masflow.compiler.plan import Plan
from masflow.errors import RunError
from masflow.models import saving
from masflow.models.engine import Reply, Request, SamplingParams
from masflow.models.experience import read_tokens
from masflow.models.speaking import ModuleSpeaker
from masflow.rl.batch import TrainRow
from masflow.rl.losses import LossSpec
from masflow.runtime.local import LocalActor
from masflow.runtime.model_group import ModelGroup
from masflow.runtime.store import Store
from masflow.runtime.worker import Worker
from masflow.spec.mapping import Chat, Lora, Optimizer
from masflow.spec.runtime import Runtime
from masflow.trace import Message, Turn

MakePlan = Callable[..., Plan]
SAMPLING = SamplingParams(temperature=0.8, max_tokens=5)
QUESTIONS = ["what is red", "say: blue", "the colour of grass", "one two three"]
OPTIMIZER = Optimizer(lr=1e-2)


@contextmanager
def _group(plan: Plan, run_dir: Path) -> Iterator[ModelGroup]:
    with closing(ModelGroup(plan.models[0], plan, run_dir)) as group:
        yield group


def _inside(group: ModelGroup) -> Worker:
    """The one worker of a group in this process."""
    [actor] = group.learners
    assert isinstance(actor, LocalActor) and isinstance(actor.instance, Worker)
    return actor.instance


def _store(group: ModelGroup) -> Store:
    assert isinstance(group.store, LocalActor)
    return group.store.instance


def _requests(policy: str, step: int = 0, samples: int = 3, **fields: Any) -> list[Request]:
    return [
        Request(
            f"{policy}-{step}-{q}-{s}",
            policy,
            (Message("user", text),),
            SAMPLING,
            seed=100 * step + 10 * q + s,
            **fields,
        )
        for q, text in enumerate(QUESTIONS)
        for s in range(samples)
    ]


def _items(replies: Sequence[Reply], policy: str) -> list[TrainRow]:
    return [
        TrainRow(r.turn_id, policy, (-1.0) ** i * (1 + i % 3), 0.05, i % 2, 0.8)
        for i, r in enumerate(replies)
    ]


def _demonstrations(member: str) -> list[Turn]:
    words = ["green", "sea", "sky", "answer red"]
    return [
        Turn(
            f"{member}-d{i}",
            (),
            "n",
            member,
            member,
            "",
            1,
            (Message("user", q),),
            words[i],
            None,
            True,
            "ok",
        )
        for i, q in enumerate(QUESTIONS)
    ]


def _weights(group: ModelGroup) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in _inside(group).base.model.named_parameters()}


def _moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {n for n in before if not torch.equal(before[n], after[n])}


def _one_step(
    group: ModelGroup, policy: str, step: int = 0, loss: LossSpec | None = None
) -> dict[str, float]:
    return group.update(
        policy, _items(group.generate(_requests(policy, step)), policy), loss or LossSpec(), step, 10
    )


def test_replies_carry_text_counts_and_versions(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan(), tmp_path) as group:
        replies = group.generate(_requests("m"))
        row = _inside(group).experience.rows([replies[0].turn_id])[0]
        assert [r.turn_id for r in replies] == [r.turn_id for r in _requests("m")]
        assert replies[0].reply_tokens == len(row.reply_ids) and replies[0].prompt_tokens == len(
            row.prompt_ids
        )
        assert replies[0].logprob == pytest.approx(sum(row.logprobs))
        assert {r.version for r in replies} == {0} and {r.finish for r in replies} <= {"stop", "length"}
        _one_step(group, "m")
        assert group.versions() == {"m": 1} and {r.version for r in group.generate(_requests("m", 1))} == {1}


@pytest.mark.parametrize("train", ["full", "lora"])
def test_a_run_repeats_bit_for_bit(group_plan: MakePlan, tmp_path: Path, train: str) -> None:
    def run(folder: Path) -> tuple[list[Reply], dict[str, torch.Tensor]]:
        plan = group_plan(train)
        with _group(plan, folder) as group:
            policy = plan.models[0].policies[0].name
            for step in range(2):
                _one_step(group, policy, step)
            return group.generate(_requests(policy, 9)), _weights(group)

    (replies, weights), (again, same) = run(tmp_path / "a"), run(tmp_path / "b")
    assert replies == again and not _moved(weights, same)


def test_a_batch_budget_changes_no_reply(group_plan: MakePlan, tmp_path: Path) -> None:
    with (
        _group(group_plan(), tmp_path / "a") as wide,
        _group(group_plan(max_batch_tokens=30), tmp_path / "b") as narrow,
    ):
        assert [r.text for r in wide.generate(_requests("m"))] == [
            r.text for r in narrow.generate(_requests("m"))
        ]


def test_a_prompt_that_does_not_fit_is_told_and_never_cut(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan(), tmp_path) as group:
        long = Request("long", "m", (Message("user", "red " * 122),), SAMPLING, 0)
        fits = replace(long, turn_id="fits", messages=(Message("user", "red " * 121),))
        replies = group.generate([long, fits])
        assert replies[0].finish == "prompt_too_long" and replies[1].finish in ("stop", "length")
        assert (
            "124 tokens and max_tokens 5 exceed the context 128" in replies[0].detail
        )  # bos, 122 words, line break
        assert replies[0].text == "" and _inside(group).experience.get("long") is None


def test_a_stop_string_is_cut_from_the_text_and_stays_in_the_ids(
    group_plan: MakePlan, tmp_path: Path
) -> None:
    with _group(group_plan(), tmp_path) as group:
        free = group.generate(_requests("m"))
        source = next(r for r in free if len(r.text.split()) >= 3)
        stop = source.text.split()[1]
        again = [replace(r, sampling=replace(SAMPLING, stop=(stop,))) for r in _requests("m")]
        reply = next(r for r in group.generate(again) if r.turn_id == source.turn_id)
        assert reply.finish == "stop" and reply.text == source.text[: source.text.index(stop)]
        row = _inside(group).experience.rows([reply.turn_id])[0]
        assert (
            stop in _inside(group).tokens.decode(row.reply_ids) and len(row.reply_ids) < source.reply_tokens
        )


def test_a_conversation_trains_on_the_ids_that_were_sampled(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan(), tmp_path) as group:
        first = group.generate(_requests("m", samples=1))
        second = []
        for request, reply in zip(_requests("m", samples=1), first, strict=True):
            said = (Message("assistant", reply.text, reply.turn_id), Message("user", "say red"))
            asked = (*request.messages, *said)
            second.append(Request(f"{reply.turn_id}+", "m", asked, SAMPLING, 5, parent=reply.turn_id))
        replies = group.generate(second)
        rows = _inside(group).experience.rows([r.turn_id for r in replies])
        for row in rows:
            parent = _inside(group).experience.rows([row.parent or ""])[0]
            assert row.prompt_ids[: row.prefix] == parent.prompt_ids + parent.reply_ids and not row.forked
        metrics = group.update("m", _items([*first, *replies], "m"), LossSpec(), 0, 1)
        assert metrics["turns"] == 8


def test_a_template_that_rewrites_history_is_counted(group_plan: MakePlan, tmp_path: Path) -> None:
    # FIELD_PROBLEMS, Tokens: templates drop reasoning from history; a fork is counted.
    rewrites = "{% for m in messages %}{{ 'gone' if m.role == 'assistant' else m.content }}\n{% endfor %}"
    plan = group_plan()
    plan = replace(plan, models=(replace(plan.models[0], chat=Chat(template=rewrites)),))
    with _group(plan, tmp_path) as group:
        first = _requests("m", samples=1)
        second = []
        for request, reply in zip(first, group.generate(first), strict=True):
            said = (Message("assistant", reply.text, reply.turn_id), Message("user", "say red"))
            asked = (*request.messages, *said)
            second.append(Request(f"{reply.turn_id}+", "m", asked, SAMPLING, 5, parent=reply.turn_id))
        assert group.traffic() == (4, 1, 0)
        replies = group.generate(second)
        assert group.traffic() == (8, 2, 4)
        # What is trained are the sampled ids after the prompt that was really shown.
        row = _inside(group).experience.rows([replies[0].turn_id])[0]
        assert row.forked and row.prefix == 0 and "gone" in row.prompt_text
        assert group.update("m", _items(replies, "m"), LossSpec(), 0, 1)["turns"] == 4


def test_the_token_trace_holds_what_was_sampled(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan(), tmp_path) as group:
        reply = group.generate(_requests("m"))[4]
        row = _inside(group).experience.rows([reply.turn_id])[0]
        group.clear_rows()
        found = read_tokens(tmp_path / "tokens/m.sqlite", reply.turn_id)  # while the group still has it open
        assert found is not None
        assert (tuple(found[0]), tuple(found[1])) == (row.prompt_ids, row.reply_ids)
        assert found[2] == pytest.approx(row.logprobs, abs=1e-6)
        with pytest.raises(RunError, match="no tokens are kept"):
            _inside(group).experience.rows([reply.turn_id])


def test_no_rows_move_nothing(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan(), tmp_path) as group:
        before = _weights(group)
        assert group.update("m", [], LossSpec(), 0, 1) == {}
        assert not _moved(before, _weights(group)) and group.versions() == {"m": 0}


def test_a_frozen_model_never_moves(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan("frozen"), tmp_path) as group:
        before = _weights(group)
        replies = group.generate(_requests("m"))
        with pytest.raises(RunError, match="is frozen"):
            group.update("m", _items(replies, "m"), LossSpec(), 0, 1)
        assert not _moved(before, _weights(group))


def test_frozen_embeddings_stay_and_everything_else_moves(
    group_plan: MakePlan, config_base: Any, tmp_path: Path
) -> None:
    with _group(group_plan(base=config_base(freeze=("embeddings",))), tmp_path) as group:
        before = _weights(group)
        _one_step(group, "m")
        assert set(before) - _moved(before, _weights(group)) == {"model.embed_tokens.weight"}


def test_adapters_are_independent_bit_for_bit(group_plan: MakePlan, tmp_path: Path) -> None:
    # FIELD_PROBLEMS, Mapping: one adapter a sub-agent; helpers read the adapter called "default" only.
    with _group(group_plan("lora", ("asker", "judge")), tmp_path) as group:
        for policy in ("m/asker", "m/judge"):
            _one_step(group, policy)
        weights = _weights(group)
        other = _inside(group).policies.learners["m/judge"].optimizer
        assert other is not None
        states = [v.clone() for s in other.state.values() for v in s.values()]
        judged = group.generate(_requests("m/judge", 5))
        _one_step(group, "m/asker", 1)
        moved = _moved(weights, _weights(group))
        assert moved and all("policy_asker" in name for name in moved)
        now = [v for s in other.state.values() for v in s.values()]
        assert all(torch.equal(a, b) for a, b in zip(states, now, strict=True))
        assert [r.text for r in group.generate(_requests("m/judge", 5))] == [r.text for r in judged]
        assert group.versions() == {"m/asker": 2, "m/judge": 1}


def test_adapters_sit_on_the_layers_that_are_named_and_a_misspelt_one_is_refused(
    group_plan: MakePlan, tmp_path: Path
) -> None:
    plan = group_plan("lora")

    def on(*targets: str) -> Plan:
        return replace(plan, models=(replace(plan.models[0], lora=Lora(rank=2, targets=targets)),))

    with _group(on("q_proj", "v_proj"), tmp_path / "a") as group:
        layers = {
            name.split(".lora_")[0].rpartition(".")[2]
            for name in _inside(group).policies.learners["m/asker"].parameters
        }
        assert layers == {"q_proj", "v_proj"}
    with pytest.raises(RunError, match=r"(?s)no linear layer is called 'q_prj'; known: down_proj.*'q_proj'"):
        ModelGroup(on("q_prj", "v_proj").models[0], on("q_prj"), tmp_path / "b")


def test_one_call_may_ask_several_adapters(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan("lora", ("asker", "judge")), tmp_path) as group:
        _one_step(group, "m/asker")
        mixed = [
            r for pair in zip(_requests("m/asker", 3), _requests("m/judge", 3), strict=True) for r in pair
        ]
        replies = group.generate(mixed)
        assert [r.turn_id for r in replies] == [r.turn_id for r in mixed]
        for place, policy in enumerate(("m/asker", "m/judge")):
            alone, among = group.generate(_requests(policy, 3)), replies[place::2]
            assert [replace(r, logprob=0.0) for r in among] == [replace(r, logprob=0.0) for r in alone]
            # Both are drawn in one batch, in which sums round otherwise.
            assert [r.logprob for r in among] == pytest.approx([r.logprob for r in alone], abs=1e-5)
        assert [r.text for r in replies[::2]] != [r.text for r in replies[1::2]]


def test_a_turn_is_trained_by_the_policy_that_spoke_it(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan("lora", ("asker", "judge")), tmp_path) as group:
        replies = group.generate(_requests("m/asker"))
        with pytest.raises(RunError, match="sampled by policy 'm/asker', not 'm/judge'"):
            group.update("m/judge", _items(replies, "m/judge"), LossSpec(), 0, 1)


@pytest.mark.parametrize("train", ["full", "lora"])
def test_save_and_load_give_the_same_next_step(group_plan: MakePlan, tmp_path: Path, train: str) -> None:
    # FIELD_PROBLEMS, Mapping: adapters were never saved, only the shared base; the checkpoint keeps one.
    plan = group_plan(train, ("asker", "judge"))
    policies = [p.name for p in plan.models[0].policies]
    loss = LossSpec(kl_weight=0.1)
    with _group(plan, tmp_path / "a") as group, _group(plan, tmp_path / "b") as other:
        group.add_rows(_demonstrations("asker"))
        group.supervise("m", ["asker-d0", "asker-d1"], OPTIMIZER, 0, 2)
        group.snapshot_reference()
        for policy in policies:
            _one_step(group, policy, 0, loss)
        group.save(tmp_path / "saved")
        other.load(tmp_path / "saved")
        assert not _moved(_weights(group), _weights(other)) and group.versions() == other.versions()
        for policy in policies:
            assert _one_step(group, policy, 1, loss) == _one_step(other, policy, 1, loss)
        assert not _moved(_weights(group), _weights(other))
        assert group.generate(_requests(policies[-1], 7)) == other.generate(_requests(policies[-1], 7))


def test_a_save_is_read_back_and_compared(
    group_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # FIELD_PROBLEMS, Mapping: adapters were never saved, only the shared base.
    real = saving.save_file

    def loses_a_bit(weights: dict[str, torch.Tensor], path: Path) -> None:
        name = sorted(weights)[-1]
        real({**weights, name: weights[name] + 1e-3}, path)

    with _group(group_plan("lora", ("asker", "judge")), tmp_path) as group:
        group.save(tmp_path / "good")
        assert len(list((tmp_path / "good").glob("*.safetensors"))) == 2
        monkeypatch.setattr(saving, "save_file", loses_a_bit)
        with pytest.raises(RunError, match="was written, but reads back otherwise"):
            group.save(tmp_path / "bad")


def test_a_disk_that_refuses_is_an_os_error_whichever_library_writes(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    for write in (saving.save_weights, saving.save_object):
        with pytest.raises(OSError, match="nowhere"):
            write(nowhere / "file", {"w": torch.zeros(1)})


def test_a_save_of_another_version_or_without_a_file_is_told(group_plan: MakePlan, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with _group(group_plan(), tmp_path / "a") as group:
        group.snapshot_reference()
        _one_step(group, "m")
        group.save(saved)
        for name in ("m.optimizer.pt", "m.reference.safetensors", "m.safetensors", "random.pt", "model.json"):
            there = (saved / name).read_bytes()
            (saved / name).unlink()
            with pytest.raises(RunError, match=rf"(?s){name}.*fix: "):
                group.load(saved)
            (saved / name).write_bytes(there)
        torch.save({"another": {"step": 1}}, saved / "m.optimizer.pt")
        with pytest.raises(RunError, match=r"can't be read: .*m\.optimizer\.pt"):
            group.load(saved)
        facts = json.loads((saved / "model.json").read_text())
        for odd in ({}, [], {k: v for k, v in facts.items() if k != "changed"}, {**facts, "versions": {}}):
            (saved / "model.json").write_text(json.dumps(odd))
            with pytest.raises(RunError, match=r"another version of masflow wrote it"):
                group.load(saved)


def test_a_save_of_other_policies_is_refused(group_plan: MakePlan, tmp_path: Path) -> None:
    with (
        _group(group_plan("lora", ("asker",)), tmp_path / "a") as group,
        _group(group_plan(), tmp_path / "b") as full,
    ):
        group.save(tmp_path / "saved")
        with pytest.raises(RunError, match="holds the policies m/asker"):
            full.load(tmp_path / "saved")


def test_demonstrations_are_learned(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan(), tmp_path) as group:
        turns = _demonstrations("asker")
        group.add_rows(turns)
        losses = [group.supervise("m", [t.id for t in turns], OPTIMIZER, s, 60)["loss"] for s in range(60)]
        assert losses[-1] < 0.05 * losses[0]
        greedy = [
            replace(r, sampling=SamplingParams(temperature=0.0, max_tokens=6))
            for r in _requests("m", samples=1)
        ]
        assert [(r.text, r.finish) for r in group.generate(greedy)] == [(t.text, "stop") for t in turns]


def test_adapters_start_from_a_shared_full_warm_start(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan("lora", ("asker", "judge")), tmp_path) as group:
        group.add_rows(_demonstrations("asker"))
        before = _weights(group)
        losses = [group.supervise("m", ["asker-d0", "asker-d3"], OPTIMIZER, s, 8)["loss"] for s in range(8)]
        moved = _moved(before, _weights(group))
        assert losses[-1] < losses[0] and moved and not any("lora" in name for name in moved)
        assert group.versions() == {"m/asker": 8, "m/judge": 8}
        texts = [[r.text for r in group.generate(_requests(p, 2))] for p in ("m/asker", "m/judge")]
        assert texts[0] == texts[1]  # fresh adapters add nothing
        before = _weights(group)
        _one_step(group, "m/asker")
        assert all("policy_asker" in name for name in _moved(before, _weights(group)))


def test_the_disabled_adapter_is_the_reference_of_a_fresh_one(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan("lora", ("asker",)), tmp_path) as group:
        group.snapshot_reference()
        assert _inside(group).policies.learners["m/asker"].reference is None
        assert _one_step(group, "m/asker", 0, LossSpec(kl_weight=0.5))["kl_ref"] == pytest.approx(
            0.0, abs=1e-2
        )
        before = _weights(group)
        assert _one_step(group, "m/asker", 1, LossSpec(kl_weight=0.5))["kl_ref"] > 1e-6
        group.snapshot_reference()
        reference = _inside(group).policies.learners["m/asker"].reference
        assert (
            reference is not None
            and reference.keys() == _inside(group).policies.learners["m/asker"].parameters.keys()
        )
        assert _moved(before, _weights(group))


def test_a_kl_pulls_back_to_the_start(group_plan: MakePlan, tmp_path: Path) -> None:
    def drift(weight: float, folder: Path) -> float:
        with _group(group_plan(optimizer=Optimizer(lr=3e-3)), folder) as group:
            group.snapshot_reference()
            for step in range(6):
                _one_step(group, "m", step, LossSpec(kl_weight=weight, kl_estimator="k2"))
            rows = _inside(group).experience.rows([r.turn_id for r in group.generate(_requests("m", 50))])
            learner = _inside(group).policies.learners["m"]
            with learner.as_reference():
                at_start = _inside(group).trainer.logprobs(rows, [0.8] * len(rows))
            return sum(
                abs(a - b)
                for row, ref in zip(rows, at_start, strict=True)
                for a, b in zip(row.logprobs, ref, strict=True)
            )

    assert drift(5.0, tmp_path / "b") < drift(1e-9, tmp_path / "a")


def test_delivery_is_proven_and_a_stale_engine_is_caught(group_plan: MakePlan, tmp_path: Path) -> None:
    # FIELD_PROBLEMS, Silent failures: the adapter never reached the rollout engine.
    with (
        _group(group_plan(), tmp_path / "a") as group,
        _group(group_plan(seed=5), tmp_path / "b") as stranger,
    ):
        first = group.prove_delivery("m")
        assert _one_step(group, "m")["delivery_gap"] < 1e-4
        second = group.prove_delivery("m")
        assert (first.version, second.version) == (0, 1) and first.checksum != second.checksum
        _inside(group).backbone = _inside(stranger).backbone
        _inside(group).engine.drop()  # what speaks next is made anew
        with pytest.raises(RunError, match="nats off the trainer"):
            group.prove_delivery("m")
        turns = _demonstrations("asker")
        group.add_rows(turns)
        group.supervise("m", [turns[0].id], OPTIMIZER, 0, 1)
        with pytest.raises(RunError, match="nats off the trainer"):
            group.generate(_requests("m", 1))


def test_log_probs_are_reused_while_what_speaks_agrees_with_the_trainer_and_else_computed_again(
    group_plan: MakePlan, tmp_path: Path
) -> None:
    with _group(group_plan(), tmp_path) as group:
        group.prove_delivery("m")
        assert "old_gap" not in _one_step(group, "m") and not group.incidents
        group._gaps["m"] = 0.03  # half precision may come to this; the bound is 0.02
        metrics = _one_step(group, "m", 1)
        assert 0 <= metrics["old_gap"] < 1e-5  # in truth both are the same here
        assert (
            "0.03 nats off its trainer: log-probs of sampled replies are computed again" in group.incidents[0]
        )
        assert "old_gap" not in _one_step(group, "m", 2)  # delivered anew meanwhile


def test_weights_that_have_blown_up_are_told_of_and_never_speak(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan(), tmp_path) as group:
        with torch.no_grad():
            next(iter(_inside(group).policies.learners["m"].parameters.values())).fill_(torch.nan)
        with pytest.raises(RunError, match=r"policy 'm', version 0: non-finite logits; .* blown up"):
            group.prove_delivery("m")
        with pytest.raises(RunError, match=r"non-finite logits for turns .*; its weights have blown up"):
            group.generate(_requests("m"))


def test_a_reset_optimizer_forgets_its_moments(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan(), tmp_path) as group:
        _one_step(group, "m")
        assert _optimizer_steps(group) == {2}  # one a mini-batch
        group.reset_optimizers()
        assert _optimizer_steps(group) == set()
        _one_step(group, "m", 1)
        assert _optimizer_steps(group) == {2}


def _optimizer_steps(group: ModelGroup) -> set[int]:
    made = _inside(group).policies.learners["m"].optimizer
    return set() if made is None else {int(state["step"]) for state in made.state.values()}


def test_settings_of_a_policy_reach_its_optimizer(group_plan: MakePlan, tmp_path: Path) -> None:
    # FIELD_PROBLEMS, Mapping: a model's own learning rate is ignored because code reads the base config.
    spec = Optimizer(lr=3e-4, betas=(0.5, 0.6), weight_decay=0.2, eps=1e-7)
    with _group(group_plan(optimizer=spec), tmp_path) as group:
        assert _one_step(group, "m")["lr"] == 3e-4
        made = _inside(group).policies.learners["m"].optimizer
        assert made is not None
        settings = made.param_groups[0]
        assert (settings["betas"], settings["weight_decay"], settings["eps"]) == ((0.5, 0.6), 0.2, 1e-7)


def test_a_trace_that_cannot_be_written_stops_the_run(group_plan: MakePlan, tmp_path: Path) -> None:
    with _group(group_plan(), tmp_path) as group:
        _store(group).trace._db.execute("PRAGMA query_only=ON")
        with pytest.raises(RunError, match=r"can't write .*m\.sqlite"):
            group.generate(_requests("m"))


@pytest.mark.parametrize(
    ("runtime", "threads"),
    [(Runtime(), 1), (Runtime(deterministic=False), 2), (Runtime(deterministic=False, threads=3), 3)],
)
def test_threads_are_fixed_where_a_run_is_deterministic_or_says_how_many(
    group_plan: MakePlan, tmp_path: Path, runtime: Runtime, threads: int
) -> None:
    torch.set_num_threads(2)
    with _group(replace(group_plan(), runtime=runtime), tmp_path):
        assert torch.get_num_threads() == threads


@pytest.mark.parametrize("train", ["full", "lora"])
def test_half_precision_trains(group_plan: MakePlan, tmp_path: Path, train: str) -> None:
    plan = group_plan(train)
    half = replace(plan.models[0], dtype="bfloat16")
    with _group(replace(plan, models=(half,)), tmp_path) as group:
        policy = half.policies[0].name
        group.snapshot_reference()
        metrics = _one_step(group, policy, 0, LossSpec(kl_weight=0.1, entropy=0.01))
        assert group.describe()["dtype"] == "bfloat16" and metrics["grad_norm"] > 0
        assert metrics["delivery_gap"] < 0.1


def test_half_precision_hides_no_engine_that_speaks_otherwise(group_plan: MakePlan, tmp_path: Path) -> None:
    plan = group_plan()
    half = replace(plan, models=(replace(plan.models[0], dtype="bfloat16"),))
    with _group(half, tmp_path) as group:
        assert group.prove_delivery("m").logprob_gap < 0.05
        engine, twisted = _inside(group).engine, copy.copy(_inside(group).backbone)
        engine._make_speaker = lambda: ModuleSpeaker(twisted)
        for factor, caught in ((1.001, False), (3.0, True)):  # its logits, against the trainer's
            engine.drop()
            twisted.scale = factor
            with pytest.raises(RunError, match="nats off the trainer") if caught else nullcontext():
                group.prove_delivery("m")
