"""The star in one process: several workers of a model, publication with its proof, deaths, feasibility."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from masflow.compiler import compile_experiment
from masflow.compiler.plan import ModelIR, Plan
from masflow.errors import RunError
from masflow.models.engine import Reply, Request, SamplingParams
from masflow.models.publishing import Payload
from masflow.rl.batch import TrainRow
from masflow.rl.losses import LossSpec
from masflow.runtime import hub
from masflow.runtime.backend import Ask
from masflow.runtime.balance import Balance
from masflow.runtime.controller import train
from masflow.runtime.local import LocalActor, LocalBackend
from masflow.runtime.model_group import ModelGroup
from masflow.runtime.placement import Layout, Node, asks_of, check_feasible, layout_of
from masflow.runtime.rundir import read_metrics
from masflow.runtime.team import Team
from masflow.runtime.worker import Worker
from masflow.spec.mapping import Optimizer
from masflow.spec.runtime import Place, RolloutWorkers, Runtime, TrainerWorkers
from masflow.trace import Message, Turn

Toy = Callable[..., Path]


def apart(model: ModelIR, rollout: int = 1) -> ModelIR:
    return replace(model, place=Place(placement="separate", rollout=RolloutWorkers(workers=rollout)))


@pytest.fixture
def one_model(toy: Toy) -> Callable[..., Plan]:
    """`one_model(rollout, train)`: the toy plan, its model with so many rollout workers and a trainer."""

    def make(rollout: int = 1, mapping: str = "{models: {policy: {roles: rest}}}") -> Plan:
        plan = compile_experiment(toy(("{models: {policy: {roles: rest}}}", mapping)))
        return replace(plan, models=tuple(apart(model, rollout) for model in plan.models))

    return make


@contextmanager
def group_of(plan: Plan, run_dir: Path, worker: type = Worker) -> Iterator[ModelGroup]:
    with closing(ModelGroup(plan.models[0], plan, run_dir, LocalBackend(), worker)) as group:
        group.ready()
        yield group


def inside(actor: Any) -> Worker:
    assert isinstance(actor, LocalActor)
    return actor.instance


def requests(policy: str, count: int = 8, step: int = 0) -> list[Request]:
    sampling = SamplingParams(temperature=0.8, max_tokens=4)
    words = ["say red", "hear blue", "say green", "hear pink"]
    return [
        Request(f"{step}-{i}", policy, (Message("user", words[i % 4]),), sampling, 10 * step + i)
        for i in range(count)
    ]


def learn(group: ModelGroup, policy: str, step: int = 0) -> dict[str, float]:
    replies = group.generate(requests(policy, step=step))
    rows = [TrainRow(r.turn_id, policy, (-1.0) ** i, 0.1, 0, 0.8) for i, r in enumerate(replies)]
    return group.update(policy, rows, LossSpec(), step, 10)


def weights(worker: Worker) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in worker.base.model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- publication ---------------------------------------------------------------------------------


@pytest.mark.parametrize("train_", ["full", "lora, adapters: per_role"])
def test_what_the_trainer_learns_reaches_every_worker_that_speaks(
    one_model: Callable[..., Plan], tmp_path: Path, train_: str
) -> None:
    plan = one_model(2, f"{{models: {{policy: {{roles: rest, train: {train_}}}}}}}")
    policy = plan.models[0].policies[0].name
    with group_of(plan, tmp_path) as group:
        assert [actor.name for actor in group.speakers] == ["policy/rollout0", "policy/rollout1"]
        turn = Turn(
            "d",
            (),
            "n",
            "caller",
            "caller",
            policy,
            1,
            (Message("user", "say red"),),
            "red",
            None,
            True,
            "ok",
        )
        group.add_rows([turn])
        group.supervise("policy", ["d"], Optimizer(lr=0.05), 0, 2)
        metrics: dict[str, float] = {}
        for step in range(2):
            metrics = learn(group, policy, step)
            assert metrics["delivery_gap"] < 1e-4 and metrics["staleness"] == 0
            learned = weights(inside(group.learners[0]))
            assert all(same(weights(inside(actor)), learned) for actor in group.speakers)
        assert group.versions()[policy] == metrics["version"] == 3
        assert {reply.version for reply in group.generate(requests(policy, step=7))} == {3}


def test_silent__the_adapter_never_reached_the_rollout_engine__delivery_is_proven(
    one_model: Callable[..., Plan], tmp_path: Path
) -> None:
    """Row of FIELD_PROBLEMS, Silent failures: a worker that drops a tensor is caught and named."""

    class Drops(Worker):
        def take(self, payload: Payload) -> None:
            if self.part.name.endswith("rollout1") and payload.version > 1:
                lost = next(iter(self.policies.learners[payload.policy].parameters.values()))
                kept = lost.detach().clone()
                super().take(payload)
                with torch.no_grad():
                    lost.copy_(kept)
            else:
                super().take(payload)

    with group_of(one_model(2), tmp_path, Drops) as group:
        learn(group, "policy")
        with pytest.raises(
            RunError, match=r"policy 'policy' was not delivered to 'policy/rollout1': version 2"
        ):
            learn(group, "policy", 1)


def test_the_probe_alone_tells_other_weights(one_model: Callable[..., Plan], tmp_path: Path) -> None:
    class Deaf(Worker):
        def take(self, payload: Payload) -> None:
            """Speaks with the old weights, and claims the new ones."""
            self.policies.versions[payload.policy] = payload.version

        def receive(self, payload: Payload) -> Any:
            self.take(payload)
            assert payload.probe is not None
            probe = payload.probe
            return self._delivery(
                payload.policy,
                payload.version,
                probe.gap(self.engine.probe(payload.policy, probe.prompt_ids, probe.reply_ids)),
            )

    with (
        group_of(one_model(), tmp_path, Deaf) as group,
        pytest.raises(RunError, match=r"not delivered to 'policy/rollout0': .* nats off the trainer"),
    ):
        for step in range(5):
            learn(group, "policy", step)


# -- deaths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("train_", ["full", "lora, adapters: per_role"])
def test_runtime__one_dead_worker_ends_the_job__it_speaks_again_with_the_last_published_weights(
    one_model: Callable[..., Plan], tmp_path: Path, train_: str
) -> None:
    """Row of FIELD_PROBLEMS, Runtime: one dead worker ends the job."""
    plan = one_model(2, f"{{models: {{policy: {{roles: rest, train: {train_}}}}}}}")
    policy = plan.models[0].policies[0].name
    with group_of(plan, tmp_path) as group:
        learn(group, policy)
        asked = requests(policy, step=5)
        before = group.generate(asked)
        group.speakers[0].kill()
        assert group.generate(asked) == before
        told = "died: it was killed; it is started again with the last published weights"
        assert group.incidents == [f"worker 'policy/rollout0' {told}"]
        assert same(weights(inside(group.speakers[0])), weights(inside(group.learners[0])))
        group.speakers[1].kill()  # found out when the next weights are published
        assert learn(group, policy, 6)["version"] == 2 and len(group.incidents) == 2
        assert same(weights(inside(group.speakers[1])), weights(inside(group.learners[0])))
        group.learners[0].kill()
        with pytest.raises(RunError, match=r"(?s)'policy/trainer0' died.*--resume --out "):
            learn(group, policy, 8)


def test_a_worker_that_dies_again_and_again_ends_the_run(
    one_model: Callable[..., Plan], tmp_path: Path
) -> None:
    class Sickly(Worker):
        def generate(self, requests: Any) -> Any:
            backend.actors[self.part.name].kill()
            return backend.actors[self.part.name].call("ready").get(0.0)

    backend = LocalBackend()
    plan = one_model()
    with (
        closing(ModelGroup(plan.models[0], plan, tmp_path, backend, Sickly)) as group,
        pytest.raises(RunError, match="'policy/rollout0' died"),
    ):
        group.generate(requests("policy"))


# -- the same run, whoever does it ---------------------------------------------------------------


def test_workers_apart_give_the_run_that_one_worker_gives(
    toy: Toy, one_model: Callable[..., Plan], tmp_path: Path
) -> None:
    def records(out: Path) -> list[dict[str, Any]]:
        found = read_metrics(out / "metrics.jsonl")
        return [{k: v for k, v in record.items() if k != "time"} for record in found]

    train(one_model(), tmp_path / "apart")
    train(compile_experiment(toy()), tmp_path / "together")
    apart_, together = records(tmp_path / "apart"), records(tmp_path / "together")
    for record in (*apart_, *together):  # the proofs measure different things
        for found in record.get("policies", {}).values():
            found.pop("delivery_gap", None)
    assert apart_ == together


def test_a_run_that_need_not_repeat_plays_without_barriers_and_keeps_the_order_of_its_episodes(
    one_model: Callable[..., Plan], tmp_path: Path
) -> None:
    plan = one_model(2)
    free = replace(plan, runtime=Runtime(deterministic=False, threads=1))
    train(free, tmp_path / "free")
    train(plan, tmp_path / "barriers")
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("free", "barriers"))
    assert [r["kind"] for r in ours] == [r["kind"] for r in theirs]
    # In one process replies come at once, so that the same episodes are played either way.
    assert [r["rewards"] for r in ours if r["kind"] == "train"] == [
        r["rewards"] for r in theirs if r["kind"] == "train"
    ]


def test_a_run_through_a_mailbox_is_the_run_itself(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = toy()
    reward = experiment.parent / "echo.py"
    reward.write_text(reward.read_text().replace("    return", "    print('heard', said)\n    return"))
    plan = compile_experiment(experiment)
    events: list[list[tuple[str, str]]] = [[], []]
    heard = [lambda kind, facts, to=to: to.append((kind, str(facts.get("message", "")))) for to in events]
    direct = hub.train(plan, tmp_path / "a", on_event=heard[0])
    printed = capsys.readouterr().err  # what a reward prints; stdout is the command's own
    posted = hub.train(plan, tmp_path / "b", on_event=heard[1], backend=LocalBackend())
    assert {**posted, "out": ""} == {**direct, "out": ""}
    assert events[0] == events[1]
    # What a process of rewards prints may arrive a little after the run that asked it, and two of them may
    # print into each other's lines: letters are counted.
    told, end = Counter(printed), time.monotonic() + 20
    assert "heard" in printed
    while True:
        told += Counter(capsys.readouterr().err)
        if all(count % 2 == 0 for count in told.values()) or time.monotonic() > end:
            break
        time.sleep(0.05)
    assert not [letter for letter, count in told.items() if count % 2], "one of the two runs printed less"


# -- dealing out ---------------------------------------------------------------------------------


def ask(number: int, prompt: str, parent: str | None = None, tokens: int = 10) -> Request:
    params = SamplingParams(max_tokens=tokens)
    return Request(f"t{number}", "p", (Message("user", prompt),), params, number, parent=parent)


def test_a_continuation_goes_to_the_worker_that_has_its_prefix() -> None:
    balance = Balance(3)
    first = balance.deal([ask(i, f"question {i}") for i in range(9)])
    assert sorted(map(len, first.values())) == [3, 3, 3]
    home = {f"t{number}": worker for worker, numbers in first.items() for number in numbers}
    second = balance.deal([ask(20 + i, f"more {i}", parent=f"t{i}") for i in range(9)])
    assert all(home[f"t{number}"] == worker for worker, numbers in second.items() for number in numbers)
    balance.forget(1)
    third = balance.deal([ask(40 + i, f"more {i}", parent=f"t{i}") for i in range(9)], among=[0, 2])
    assert sorted(number for numbers in third.values() for number in numbers) == list(range(9))


def test_samples_of_one_prompt_stay_together_and_the_load_is_even() -> None:
    dealt = Balance(2).deal([ask(i, f"prompt {i // 4}") for i in range(16)])
    assert all({n // 4 for n in numbers} == {numbers[0] // 4, numbers[-1] // 4} for numbers in dealt.values())
    assert [len(numbers) for numbers in dealt.values()] == [8, 8]
    dealt = Balance(2).deal([ask(0, "long", tokens=300), *(ask(i, f"short {i}") for i in range(1, 13))])
    assert dealt[0] == [0] and dealt[1] == list(range(1, 13))
    assert Balance(4).deal([ask(i, "the same") for i in range(8)]) == {
        w: [2 * w, 2 * w + 1] for w in range(4)
    }


# -- placement -----------------------------------------------------------------------------------


def test_auto_is_colocated_where_one_process_does_both(one_model: Callable[..., Plan]) -> None:
    model = one_model().models[0]

    def layout(**place: Any) -> Layout:
        return layout_of(replace(model, place=Place(**place)), Runtime())

    two = TrainerWorkers(workers=2)
    assert layout() == Layout(True, 1, 1) and layout(trainer=two) == Layout(False, 1, 2)
    assert layout(placement="colocated", trainer=two) == Layout(True, 2, 2)
    assert layout(placement="separate") == Layout(False, 1, 1)
    frozen = replace(model, train="frozen", place=Place(rollout=RolloutWorkers(workers=3)))
    assert layout_of(frozen, Runtime()) == Layout(True, 3, 0)


def test_unsaid_cpus_are_none_on_a_shared_machine_and_one_on_a_cluster(
    one_model: Callable[..., Plan],
) -> None:
    model = one_model(2).models[0]
    here = dict(asks_of(model, Runtime(backend="ray")))
    assert list(here) == ["policy/store", "policy/trainer0", "policy/rollout0", "policy/rollout1"]
    assert not any(ask.cpus or ask.gpus for ask in here.values())
    there = dict(asks_of(model, Runtime(backend="ray", address="auto")))
    assert [ask.cpus for ask in there.values()] == [0, 1, 1, 1]
    on_gpus = replace(model, place=Place(rollout=RolloutWorkers(gpus=1), trainer=TrainerWorkers(gpus=0.5)))
    asks = dict(asks_of(on_gpus, Runtime(backend="ray", address="auto")))
    assert asks["policy/worker0"].gpus == 1 and asks["policy/worker0"].cpus == 0


def test_an_impossible_request_names_what_is_asked_for_and_what_there_is() -> None:
    nodes = [Node("a", 4, 1), Node("b", 8, 2)]
    check_feasible({"x": Ask(cpus=8), "y": Ask(cpus=4), "z": Ask(gpus=1), "w": Ask(gpus=2)}, nodes)
    with pytest.raises(RunError) as raised:
        check_feasible({"m/trainer0": Ask(cpus=1, gpus=2), "m/trainer1": Ask(cpus=1, gpus=2)}, nodes)
    text = str(raised.value)
    assert "2 processes want 2 CPUs and 4 GPUs" in text and "a: 4 CPUs, 1 GPUs; b: 8 CPUs, 2 GPUs" in text
    assert "no room for m/trainer1 (1 CPUs, 2 GPUs each)" in text and "fix: ask for fewer workers" in text


def test_every_shipped_mapping_places_on_two_cores() -> None:
    root = Path(__file__).resolve().parents[2]
    for runtime in ("runtime/ray.yaml",):
        for mapping in sorted((root / "mappings").glob("*.yaml")):
            own = root / f"examples/small/{mapping.stem}.yaml"  # of a mapping that names its team's roles
            file = own if own.exists() else root / "examples/quickstart.yaml"
            plan = compile_experiment(file, mapping=mapping, runtime=root / runtime)
            check_feasible(
                {n: a for m in plan.models for n, a in asks_of(m, plan.runtime)}, [Node("pc", 2, 0)]
            )


def test_a_team_closes_what_it_began_when_a_model_cannot_be_loaded(toy: Toy, tmp_path: Path) -> None:
    plan = compile_experiment(toy())
    broken = replace(plan.models[0], base=str(tmp_path / "nowhere"))
    with pytest.raises(RunError, match="can't load the base"):
        Team(replace(plan, models=(broken,)), tmp_path / "run")


def test_replies_are_plain(one_model: Callable[..., Plan], tmp_path: Path) -> None:
    with group_of(one_model(), tmp_path) as group:
        [reply] = group.generate(requests("policy", 1))
    assert isinstance(reply, Reply) and json.dumps(reply.__dict__)
