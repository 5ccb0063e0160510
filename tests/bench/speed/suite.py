"""The comparisons of `make bench`: two sides, what they work on, and the bar of their ratio."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tests.bench.speed.workloads import Workload

RETRIEVAL = Workload("retrieval", "1M", prompt_tokens=512, tasks=4, micro=16, steps=3)
SHORT = Workload("short", "1M", prompt_tokens=32, tasks=8, steps=6)
TALK = Workload("conversation", "1M", prompt_tokens=64, tasks=21, group=4, roles=2, turns=4, steps=1)
PAIR = Workload("two_roles", "1M", prompt_tokens=64, tasks=1, group=8, roles=2, steps=12)
FLOOR = 1 / 1.5
NODES = Workload("nodewise", "1M", prompt_tokens=512, group=5, nodes=6, tasks=4, steps=1, credit="local")
ROLLOUT = replace(NODES, name="nodewise_rollout", credit="rollout")


@dataclass(frozen=True)
class Side:
    """A script of this folder, what it is told, and by which Python it is run."""

    label: str
    script: str
    words: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    is_peer: bool = False
    """Run by the peers' own environment."""


@dataclass(frozen=True)
class Comparison:
    """Two sides in turns: the first one's rate over the second one's is the ratio."""

    name: str
    sides: tuple[Side, Side]
    model: str | None = None
    """Whose folder both sides are told, behind the workload."""
    work: Workload | None = None
    bar: float | None = None
    """The ratio has to be at least this; None: reported whatever it is."""
    memory: float | None = None
    """The first side's extra memory over the second one's may be this at most."""
    equal: str | None = None
    """A fact that both sides have to agree on."""
    unit: str = "samples"
    most_pairs: int = 99
    """Where a pair takes minutes."""

    @property
    def kind(self) -> str:
        return self.name.partition("-")[0]


def sized(work: Workload, model: str) -> Workload:
    """The workload on another model; larger ones get fewer tasks and steps."""
    if model == "1M":
        return work
    tasks, steps = {"5M": (4, 2), "20M": (2, 1), "SmolLM2-135M": (1, 1)}.get(model, (2, 1))
    return replace(work, model=model, tasks=min(work.tasks, tasks), steps=min(work.steps, steps), micro=8)


def trained(work: Workload, other: str, bar: float | None, memory: float | None = None) -> Comparison:
    """masflow against a peer or the floor on a workload of training steps."""
    sides = Side("masflow", "side_masflow"), Side(other, f"side_{other}", is_peer=other in ("trl", "comlrl"))
    return Comparison(f"{work.name}-{work.model}-{other}", sides, work.model, work, bar, memory)


def micro(
    name: str, script: str, words: tuple[str, str], labels: tuple[str, str], *, model: str | None = None
) -> Comparison:
    """One script of ours in two ways."""
    first, second = (Side(label, script, (word,)) for label, word in zip(labels, words, strict=True))
    return Comparison(name, (first, second), model)


SIZES = ("1M", "5M", "20M")
DETERMINISTIC = Comparison(
    "deterministic-1M",
    (
        Side("off", "side_masflow", env={"BENCH_DETERMINISTIC": "false"}),
        Side("on", "side_masflow", env={"BENCH_DETERMINISTIC": "true"}),
    ),
    "1M",
    replace(TALK, tasks=8),
)


LOCAL = Comparison(
    "nodewise_local-1M-trajectories",
    (
        Side("masflow, local", "side_masflow", (NODES.text(),)),
        Side("masflow, trajectories", "side_masflow", (replace(NODES, credit="").text(),)),
    ),
    "1M",
    bar=2.0,
)


def player(shape: str, ours: str, theirs: str, bar: float | None) -> Comparison:
    sides = (
        Side(f"masflow {ours}", "side_player", (shape, ours)),
        Side(f"LangGraph {theirs}", "side_langgraph", (shape, theirs), is_peer=True),
    )
    return Comparison(f"player-{shape}-{ours}-{theirs}", sides, bar=bar, unit="nodes")


COMPARISONS: tuple[Comparison, ...] = (
    *(trained(sized(RETRIEVAL, size), "trl", 4.0, 1.0) for size in SIZES),
    *(trained(sized(RETRIEVAL, size), "floor", FLOOR) for size in SIZES),
    trained(SHORT, "trl", 1.3),
    trained(SHORT, "floor", FLOOR),
    trained(TALK, "comlrl", 5.0),
    trained(TALK, "floor", FLOOR),
    trained(PAIR, "comlrl", None),
    LOCAL,
    trained(NODES, "floor", FLOOR),
    trained(ROLLOUT, "floor", 1 / 1.3),
    player("chain", "untraced", "untraced", 10.0),
    player("loop", "untraced", "untraced", 10.0),
    player("chain", "traced", "traced", 5.0),
    player("loop", "traced", "traced", 5.0),
    player("chain", "traced", "untraced", 5.0),
    player("loop", "traced", "untraced", 5.0),
    Comparison(
        "start-quickstart",
        (Side("masflow run", "side_start", ("run",)), Side("imports", "side_start", ("imports",))),
        bar=FLOOR,
        unit="starts",
    ),
    replace(
        micro(
            "adapters-1M", "side_adapters", ("together", "modules"), ("one batch", "four passes"), model="1M"
        ),
        bar=2.0,
        equal="digest",
        unit="replies",
    ),
    DETERMINISTIC,
    replace(
        micro("head-150k", "side_head", ("fused", "plain"), ("fused", "plain")),
        bar=1 / 1.15,
        memory=0.25,
        unit="tokens",
    ),
    *(
        replace(trained(sized(RETRIEVAL, model), other, None), most_pairs=most)
        for model, most in (("v49k", 3), ("v150k", 2), ("SmolLM2-135M", 2))
        for other in ("trl", "floor")
    ),
)


def workload(name: str) -> Workload:
    """By name and model, as `retrieval-1M`."""
    kind, _, model = name.partition("-")
    return sized({"retrieval": RETRIEVAL, "short": SHORT, "conversation": TALK}[kind], model)
