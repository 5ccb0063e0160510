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
class Learned:
    """What four optimizer steps showed."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    """Of AdamW."""
    norm: float = 0.0
    """Of the first step's gradient, clipped."""
    moved: set[str] = field(default_factory=set)
    """Weights that the first step changed."""
    passes: int = 0
    """Of the first layer with gradients."""

    def count(self, has_gradients: bool) -> None:
        self.passes += has_gradients


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

    @cached_property
    def learned(self) -> Learned:
        """Four real optimizer steps of a run of four."""
        found = Learned()
        layer = self.worker.base.model.model.layers[0]
        for step in range(4):
            replies = self.ask(4, f"say red {step}")
            paid = zip(replies, (1.0, -0.5, 0.75, -0.25), strict=True)  # equal replies don't cancel out
            rows = [TrainRow(reply.turn_id, self.policy, gain, 0.5, 0, 1.0) for reply, gain in paid]
            before = {n: w.detach().clone() for n, w in self.worker.base.model.named_parameters()}
            counts = layer.mlp.register_forward_pre_hook(lambda *_: found.count(torch.is_grad_enabled()))
            found.metrics.append(self.group.update(self.policy, rows, LossSpec(), step, 4))
            counts.remove()
            if step == 0:
                now = dict(self.worker.base.model.named_parameters())
                found.moved = {name for name in now if not torch.equal(now[name], before[name])}
                found.norm = self._clipped_norm()
        found.settings = dict(self._optimizer.param_groups[0])
        return found

    @property
    def _optimizer(self) -> torch.optim.AdamW:
        optimizer = self.worker.policies.learners[self.policy].optimizer
        assert optimizer is not None
        return optimizer

    def _clipped_norm(self) -> float:
        """Adam's first moment after one step is (1 - beta1) times the clipped gradient."""
        moments = [state["exp_avg"].square().sum() for state in self._optimizer.state.values()]
        return float(torch.stack(moments).sum().sqrt()) / (1 - self._optimizer.param_groups[0]["betas"][0])

    def ask_of(self, kind: str) -> Ask:
        """What the first process that speaks, or learns, takes."""
        assert self.group
        asks = self.backend.asks
        return asks.get(f"{self.model.name}/{kind}0") or asks[f"{self.model.name}/worker0"]


def inside(actor: Actor) -> Worker:
    assert isinstance(actor, LocalActor) and isinstance(actor.instance, Worker)
    return actor.instance


# -- what is seen where it acts ---------------------------------------------------------------------


def members(side: Side) -> list[str]:
    return [role for role, policy in side.worker.policies.of_member.items() if policy == side.policy]


def setting(key: str) -> Callable[[Side], Any]:
    return lambda side: side.learned.settings[key]


def rate_at(step: int) -> Callable[[Side], float]:
    return lambda side: side.learned.metrics[step]["lr"]


def moves(side: Side) -> str:
    try:
        moved = side.learned.moved
    except RunError as error:
        assert "is frozen" in str(error)
        return "frozen"
    return "adapter" if all("lora_" in name for name in moved) else "full"


def embeddings_move(side: Side) -> bool:
    return any("embed" in name for name in side.learned.moved)


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


def embedding_std(side: Side) -> float:
    """Of another policy's making: before anything is learned here, or with frozen embeddings."""
    return round(float(side.worker.base.model.get_input_embeddings().weight.std()), 1)


def knows(letter: str) -> Callable[[Side], bool]:
    def see(side: Side) -> bool:
        tokenizer = side.worker.base.tokenizer
        return tokenizer.convert_tokens_to_ids(letter) != tokenizer.unk_token_id

    return see


def num_tokens(word: str) -> Callable[[Side], int]:
    return lambda side: len(side.worker.base.tokenizer.tokenize(word))


def prompt(side: Side) -> str:
    return side.worker.tokens.prompt(SAID).text


def four_bits(side: Side) -> bool:
    """Without a GPU the worker says what it lacks."""
    try:
        return getattr(side.worker.base.model, "is_loaded_in_4bit", False)
    except RunError as error:
        return "4 bits need" in str(error)


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
