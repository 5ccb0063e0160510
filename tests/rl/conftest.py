"""Trajectories written down turn by turn, for rewards and credit that can be worked out on paper."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from masflow.compiler.graph import FunctionIR, Graph, Node, RewardIR, RoleIR
from masflow.compiler.plan import ModelIR, Plan, PolicyIR
from masflow.spec.experiment import Algorithm
from masflow.spec.mapping import Optimizer
from masflow.trace import DEFAULT_POLICY, EpisodeKey, Moment, Step, Trajectory, Turn

FUNCTIONS = """
import time

def same(prediction, gold):
    return float(prediction == gold)

def number(x):
    return x

def breaks(x):
    raise ValueError("no luck")

def hangs(x):
    time.sleep(30)

def strange(x):
    return "good"

def huge(x):
    return 10**400

class Several:
    def __float__(self):
        raise RuntimeError("several numbers")
    def __repr__(self):
        return "several"

def several(x):
    return Several()

def meddles(words, trajectory):
    words.append("more")
    trajectory.output["answer"] = "changed"
    return len(words)

def infinite(x):
    return float("inf")

def enormous(x):
    return 1e308

def null(x):
    return None

def maybe(x=None):
    return 1.0 if x is None else 2.0

async def later(x):
    return x / 2

def length(turn):
    return float(len(turn.text))

def count(trajectory):
    return len(trajectory.turns)

def shares(trajectory):
    return {t.id: 1 / len(trajectory.turns) for t in trajectory.turns if t.ok}

def wrong_ids(trajectory):
    return {"0": 1.0}
"""


@dataclass
class Story:
    """An episode being written down: `say` adds a turn, `do` a tool's moment; both keep the names then."""

    slot: int = 0
    sample: int = 0
    names: dict[str, Any] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    superstep: int = 0

    @property
    def key(self) -> EpisodeKey:
        return EpisodeKey(0, "train", 1, self.slot, f"task{self.slot}", self.sample)

    def say(self, role: str, value: Any = None, *, ok: bool = True, tokens: int = 10, **more: Any) -> Turn:
        node = more.pop("node", role)
        visit = more.pop("visit", sum(t.node == node and t.last for t in self.turns) + 1)
        rest = {name: more.pop(name) for name in ("item", "model_call", "attempt") if name in more}
        path = more.pop("path", (Step("", node, visit, **rest),))
        if not more.pop("at_once", False):
            self.superstep += 1
        self.names = {**self.names, node: value}
        turn = Turn(
            id=self.key.turn_id(path), path=path, node=node, role=role, member=more.pop("member", role),
            policy=more.pop("policy", "policy"), superstep=self.superstep,
            messages=more.pop("messages", ()), text=str(value),
            value=value, ok=ok, outcome=more.pop("outcome", "ok" if ok else "malformed"),
            reply_tokens=tokens, **more,
        )  # fmt: skip
        self.turns.append(turn)
        self.moments.append(Moment(node, path, self.superstep, {**self.names, "result": value}))
        return turn

    def do(self, node: str, value: Any) -> None:
        self.names = {**self.names, node: value}
        visit = sum(m.node == node for m in self.moments) + 1
        self.moments.append(
            Moment(node, (Step("", node, visit),), self.superstep, {**self.names, "result": value})
        )

    def end(self, outcome: str = "ok") -> Trajectory:
        return Trajectory(
            self.key, {}, tuple(self.turns), (), outcome, "", {}, self.names, tuple(self.moments)
        )


@pytest.fixture
def story() -> type[Story]:
    return Story


@pytest.fixture
def reward(tmp_path) -> Callable[..., RewardIR]:
    """`reward(name, function, **fields)`; its functions are those of FUNCTIONS."""
    (tmp_path / "fns.py").write_text(FUNCTIONS)

    def make(name: str, function: str | None, **fields: Any) -> RewardIR:
        nullable = fields.pop("nullable", ())
        found = FunctionIR(f"{tmp_path}/fns.py:{function}", nullable=nullable) if function else None
        return RewardIR(name, found, **fields)

    return make


@pytest.fixture
def plan(tmp_path) -> Callable[..., Plan]:
    """`plan(*rewards, algorithm=…, policies=…, **graph fields)` over whatever roles the stories name."""

    def make(
        *rewards: RewardIR, algorithm: Algorithm | None = None, policies: Any = None, **fields: Any
    ) -> Plan:
        roles = fields.pop("roles", ("planner", "answerer", "searcher", "critic"))
        graph = Graph(
            "w", roles=tuple(RoleIR(r, "p") for r in roles),
            nodes=tuple(Node(r, "role", role=r) for r in roles),
            rewards=rewards, outcomes={**DEFAULT_POLICY, **fields.pop("outcomes", {})}, **fields,
        )  # fmt: skip
        named = policies or {"policy": roles}
        models = tuple(
            ModelIR(
                name,
                None,
                "",
                "full",
                (PolicyIR(name, name, None, tuple(members), name != "frozen", Optimizer()),),
            )
            for name, members in named.items()
        )
        return Plan("w", {"w": graph}, models, algorithm=algorithm or Algorithm(), root_dir=str(tmp_path))

    return make
