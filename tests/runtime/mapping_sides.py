"""One policy of a team where it runs, and what can be seen of each of its settings there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file

from masflow.compiler.plan import ModelIR, Plan
from masflow.errors import RunError
from masflow.models.engine import Reply, Request, SamplingParams
from masflow.models.weights import checksum
from masflow.rl.batch import TrainRow
from masflow.rl.losses import LossSpec
from masflow.runtime.backend import Actor, Ask
from masflow.runtime.endpoint_group import EndpointGroup
from masflow.runtime.local import LocalActor, LocalBackend
from masflow.runtime.model_group import ModelGroup
from masflow.runtime.vllm_worker import worker_of
from masflow.runtime.worker import Worker
from masflow.trace import Message

SAID = (Message("user", "say red"),)


class Asked(LocalBackend):
    """Real workers in this process, and what each would have taken of a cluster."""

    def __init__(self) -> None:
        super().__init__()
        self.asks: dict[str, Ask] = {}

    def spawn(self, name: str, cls: type, *args: Any, ask: Ask | None = None) -> Actor:
        if ask is not None:
            self.asks[name] = ask
        return super().spawn(name, cls, *args)


@dataclass
class Side:
    """A policy where it runs."""

    plan: Plan
    model: ModelIR
    policy: str
    out: Path
    around: Path
    """Earlier runs."""
    stack: ExitStack
    server: Any
    """The chat server, where one plays."""
    backend: Asked = field(default_factory=Asked)

    @cached_property
    def group(self) -> ModelGroup:
        group = ModelGroup(self.model, self.plan, self.out, self.backend, worker_of(self.model, self.plan))
        self.stack.callback(group.close)
        return group

    @cached_property
    def served(self) -> EndpointGroup:
        group = EndpointGroup(self.model)
        self.stack.callback(group.close)
        return group

    @property
    def learners(self) -> list[Worker]:
        return [inside(actor) for actor in self.group.learners]

    @property
    def worker(self) -> Worker:
        return self.learners[0]

    @property
    def weights(self) -> dict[str, Any]:
        return dict(self.worker.policies.learners[self.policy].parameters)

    def ask(self, number: int = 1, text: str = "say red") -> list[Reply]:
        how = SamplingParams(max_tokens=3)
        said = (Message("user", text),)
        asked = [Request(f"{self.policy}-{i}-{text}", self.policy, said, how, i) for i in range(number)]
        return (self.group if self.model.endpoint is None else self.served).generate(asked)

    def learn(self, *steps: int) -> list[dict[str, float]]:
        """Metrics of one real optimizer step each, of a run of four."""
        found = []
        for step in steps:
            replies = self.ask(4, f"say red {step}")
            rows = [TrainRow(r.turn_id, self.policy, (-1.0) ** i, 0.5, 0, 1.0) for i, r in enumerate(replies)]
            found.append(self.group.update(self.policy, rows, LossSpec(), step, 4))
        return found

    def ask_of(self, kind: str) -> Ask:
        """What the first process of this kind takes."""
        assert self.group
        return self.backend.asks[f"{self.model.name}/{kind}0"]


def inside(actor: Actor) -> Worker:
    assert isinstance(actor, LocalActor) and isinstance(actor.instance, Worker)
    return actor.instance


# -- what is seen where it acts ---------------------------------------------------------------------


def members(side: Side) -> list[str]:
    return [role for role, policy in side.worker.policies.of_member.items() if policy == side.policy]


def group_of(key: str) -> Callable[[Side], Any]:
    """A setting of AdamW after a step."""

    def see(side: Side) -> Any:
        side.learn(0)
        optimizer = side.worker.policies.learners[side.policy].optimizer
        assert optimizer is not None
        return optimizer.param_groups[0][key]

    return see


def rates(side: Side) -> list[float]:
    return [round(metrics["lr"], 6) for metrics in side.learn(0, 1, 2, 3)]


def clipped_norm(side: Side) -> float:
    """Adam's first moment after one step is (1 - beta1) times the clipped gradient."""
    [metrics] = side.learn(0)
    optimizer = side.worker.policies.learners[side.policy].optimizer
    assert optimizer is not None and metrics["grad_norm"] > 1e-3
    moments = [state["exp_avg"].square().sum() for state in optimizer.state.values()]
    return round(float(torch.stack(moments).sum().sqrt()) / (1 - optimizer.param_groups[0]["betas"][0]), 4)


def moves(side: Side) -> str:
    before = checksum(side.worker.policies.weights)
    try:
        side.learn(0)
    except RunError as error:
        assert "is frozen" in str(error)
        return "frozen"
    return "full" if checksum(side.worker.policies.weights) != before else "adapter"


def layers(side: Side) -> list[tuple[str, Any]]:
    name = str(side.worker.policies.adapter_of(side.policy))
    modules = side.worker.base.model.named_modules()
    return [(n.rpartition(".")[2], m) for n, m in modules if isinstance(m, LoraLayer) and name in m.lora_A]


def rank(side: Side) -> int:
    return next(w.shape[0] for name, w in side.weights.items() if "lora_A" in name)


def scaling(side: Side) -> float:
    return layers(side)[0][1].scaling[side.worker.policies.adapter_of(side.policy)]


def targets(side: Side) -> set[str]:
    return {name for name, _ in layers(side)}


def starts_from(run: str, file: str) -> Callable[[Side], bool]:
    """Whether the weights are those of an earlier run's checkpoint."""

    def see(side: Side) -> bool:
        saved = load_file(side.around / f"{run}/checkpoints/step_000001/models/{file}.safetensors")
        own = side.weights
        return own.keys() == saved.keys() and all(torch.equal(own[name], saved[name]) for name in own)

    return see


def embeddings_move(side: Side) -> bool:
    weight = side.worker.base.model.get_input_embeddings().weight
    before = weight.detach().clone()
    side.learn(0)
    return not torch.equal(weight, before)


def tokens_of(word: str) -> Callable[[Side], int]:
    return lambda side: len(side.worker.base.tokenizer.tokenize(word))


def prompt(side: Side) -> str:
    return side.worker.tokens.prompt(SAID).text


def four_bits(side: Side) -> bool:
    """Without a GPU the worker says what it lacks."""
    try:
        return getattr(side.worker.base.model, "is_loaded_in_4bit", False)
    except RunError as error:
        return "4 bits need" in str(error)


def passes(side: Side) -> int:
    """Forward passes of a layer where gradients are taken, in one optimizer step."""
    seen = [0]
    [layer] = side.worker.base.model.model.layers
    side.ask(4, "say red 0")
    layer.mlp.register_forward_pre_hook(lambda *_: seen.__setitem__(0, seen[0] + torch.is_grad_enabled()))
    side.learn(0)
    return seen[0]


def body(key: str) -> Callable[[Side], Any]:
    def see(side: Side) -> Any:
        side.ask()
        return side.server.bodies[-1].get(key)

    return see


def bearer(side: Side) -> Any:
    side.ask()
    return side.server.keys[-1]


def path(side: Side) -> str:
    side.ask()
    return side.server.paths[-1]


def at_once(side: Side) -> int:
    """Requests that the server had in hand together; it holds each until there are two, or for a while."""
    server, bound_s = side.server, 0.1 if side.policy == "told" else 10.0
    says = type(server.reply({}))

    def reply(_: Any) -> Any:
        if server.most_at_once >= 2:
            server.released.set()
        return says(after_s=bound_s)

    server.reply, server.most_at_once = reply, 0
    side.ask(2)
    return server.most_at_once


def waits(side: Side) -> list[bool]:
    pace = side.served.engine.client._pace
    return [pace.wait_s() > 0 for _ in range(2)]


def answered(**says: Any) -> Callable[[Side], bool]:
    """Whether a reply comes when the server's first answer is this one."""

    def see(side: Side) -> bool:
        side.server.script.append(type(side.server.reply({}))(**says))
        try:
            return side.ask()[0].text == "yes"
        except RunError:
            return False

    return see


def kinds(side: Side) -> list[str]:
    return sorted({actor.name.rpartition("/")[2] for actor in side.group.actors})


def strategy(side: Side) -> str:
    return side.worker.part.strategy


def worlds(side: Side) -> list[tuple[int, int]]:
    return [(worker.part.rank, worker.part.world) for worker in side.learners]


def engine(key: str) -> Callable[[Side], Any]:
    return lambda side: getattr(inside(side.group.speakers[0]).engine, key)
