"""The experiment document: puts workflow, mapping, runtime, data, algorithm and schedule together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from masflow.spec.base import Fault, JsonValue, Spec, by_shape
from masflow.spec.mapping import ConfigBase, Mapping, Optimizer
from masflow.spec.runtime import Runtime
from masflow.spec.workflow import Either, Workflow


class WorkflowUse(Spec):
    """A workflow file with its parameters."""

    use: Annotated[Annotated[str, Tag("<name>")] | Annotated[Workflow, Tag("<inline>")], Either]
    params: dict[str, JsonValue] = Field(default_factory=dict)


class DataSource(Spec):
    """Rows from one file, folder that `datasets` saved, or Hugging Face id.

    Several sources make a mixture. Without weights every row comes once an epoch, as if all were one file.
    With weights a source gives its weight's share of the tasks, however many rows it has: each is shuffled by
    itself, and a small one begins again while a large one goes on. What is drawn depends on the seed and on
    how much was drawn before, so that a resumed run goes on where it stood.
    """

    path: str
    split: str | None = None
    weight: float | None = Field(default=None, gt=0)
    """Share of the tasks (of the warm start: of each role's turns) among the weights of the other sources,
    which then have one too. Rows that are only scored have none: each is scored once."""
    name: str | None = None
    """In metrics; default: the file's name without its ending."""


OneSource = Annotated[Annotated[str, Tag("<name>")] | Annotated[DataSource, Tag("<inline>")], Either]
Source = Annotated[
    Annotated[str, Tag("<name>")]
    | Annotated[DataSource, Tag("<inline>")]
    | Annotated[tuple[OneSource, ...], Tag("<list>")],
    Discriminator(by_shape("<inline>", "<name>", "<list>")),
]
"""A path or id, the long form, or a mixture."""


class Data(Spec):
    """Where tasks come from."""

    train: Source | None = None
    eval: Source | None = None
    extra: dict[str, Source] = Field(default_factory=dict)
    """Further named splits for `masflow eval --split NAME`."""

    hints: ClassVar[dict[str, str]] = {"test": "extra: {test: …}", "dev": "extra: {dev: …}", "valid": "eval"}

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        extra = data.get("extra")
        for name in ("train", "eval", "warm_start"):
            if isinstance(extra, dict) and name in extra:
                message = f"'{name}' has a place of its own; 'extra' holds further splits"
                yield Fault(message, code="reserved-name", fix="rename the split", path=("extra", name))


class WarmStart(Spec):
    """Supervised training on demonstrations before RL."""

    data: Source
    steps: int = Field(default=200, ge=0)
    batch: int = Field(default=64, ge=1)
    """Demonstrated turns of each role in one update."""
    optimizer: Optimizer = Optimizer(lr=1e-3)


ALGORITHMS = (
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce_pp",
    "gspo",
    "cispo",
    "ppo",
    "turn_ppo",
    "ippo",
    "mappo",
    "magrpo",
    "at_grpo",
    "dr_mas",
    "m_grpo",
    "matpo",
    "gigpo",
)
"""Presets of `masflow/algorithms`; installed packages offer more."""


class Kl(Spec):
    """Penalty against a reference: the model at the start of RL."""

    weight: float = Field(default=0.0, ge=0)
    estimator: Literal["k1", "k2", "k3"] = "k3"
    place: Literal["loss", "reward"] = "loss"
    """`reward`: each token pays for its own and all later divergences, before advantages are normalised;
    that is k1, whatever the estimator."""


class Overlong(Spec):
    """A reply that nears its role's `max_tokens` pays for it, softly (arXiv 2503.14476, eq. 13).

    Within the last `cache` tokens of the budget the turn's reward falls linearly from 0 to -`penalty`; a
    truncated reply pays all of it. `false` turns off what a preset turns on.
    """

    cache: int | None = Field(default=None, ge=1)
    """Tokens before the end of the budget; default: a fifth of it."""
    penalty: float = Field(default=1.0, ge=0)

    @classmethod
    def longhand(cls, data: Any) -> Any:
        return {"penalty": 0.0} if data is False else data


class Dynamic(Spec):
    """Dynamic sampling: tasks without a learnable group are replaced by further ones, in task order.

    `false` turns off what a preset turns on.
    """

    max_rounds: int = Field(default=4, ge=1)
    """Rounds of drawing a step, the first one included; 1 replaces nothing."""

    @classmethod
    def longhand(cls, data: Any) -> Any:
        return {"max_rounds": 1} if data is False else data


class Critic(Spec):
    """A value function that is learned beside the policies: who shares one, from what it starts, how it
    learns."""

    per: Literal["role", "model", "team"] | None = None
    """`role`: one network a role; `model`: one a model, with a value head a role; `team`: one for everybody,
    which sees the prompts of all roles as text. Default: the preset's, else `model`."""
    base: str | None = None
    """Folder or id; default: the model whose roles it judges, as it is when RL begins (after a warm start or
    `init`), adapters left out. A critic that reads a model's tokens needs one with the same tokenizer."""
    optimizer: Optimizer = Optimizer()
    value_clip: float | None = Field(default=0.2, gt=0)
    """A value may move this far from where it stood before the step's first update without the loss looking
    away (PPO's value clipping); null: as far as it likes."""
    warmup_steps: int = Field(default=0, ge=0)
    """The run's first steps in which critics learn and policies stay as they are."""

    hints: ClassVar[dict[str, str]] = {"lr": "optimizer: {lr: …}", "warmup": "warmup_steps", "model": "base"}


class Gae(Spec):
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16)."""

    gamma: float | None = Field(default=None, ge=0, le=1)
    """Discount a token; default: 1. Between turns it is the workflow's `discount`, a superstep."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """How far advantages look ahead: 0 one token (or turn), 1 to the end."""

    hints: ClassVar[dict[str, str]] = {"lambda": "lam", "gae_lambda": "lam", "discount": "gamma"}


class Importance(Spec):
    """Truncated importance sampling between the engine that sampled and the weights that train.

    Each token's loss is multiplied by min(trainer's probability / engine's probability, `cap`), as constants.
    """

    cap: float = Field(default=2.0, gt=0)


class Algorithm(Spec):
    """`use` selects a preset whose defaults are the published setting; every other field overrides it.

    Fields without a default here have the preset's (`masflow/algorithms/README.md` has a table).
    """

    hints: ClassVar[dict[str, str]] = {
        "name": "use",
        "gamma": "gae: {gamma: …}",
        "lam": "gae: {lam: …}",
        "lambda": "gae: {lam: …}",
        "clip_range": "clip_low: …, clip_high: …",
        "clip_eps": "clip_low: …, clip_high: …",
        "value_clip": "critic: {value_clip: …}",
        "beta": "kl: {weight: …}",
        "kl_coef": "kl: {weight: …}",
        "entropy_coef": "entropy",
        "num_generations": "samples",
        "lr": "optimizer: {lr: …} in train",
    }

    @classmethod
    def longhand(cls, data: Any) -> Any:
        return {"use": data} if isinstance(data, str) else data

    use: str = "grpo"
    """A name of `masflow/algorithms`, or of an installed package."""
    samples: int | None = Field(default=None, ge=1)
    """Episodes a task; default: 8, unless a pass draws them."""
    temperature: float = Field(default=1.0, ge=1e-3, le=1e3)
    """Sampling temperature in training, where a role says nothing; the loss divides logits by it too."""
    group: Literal["task_role_path", "task_role", "task_call", "task", "state"] | None = None
    """Which turns share a baseline. `task_role_path`: those at one place of one task, in each of its
    episodes. `task_role`: all turns of a role in a task's episodes. `task_call`: as that, but all turns in
    one call of a sub-workflow (else in one episode) count once, with their mean, and share their advantage.
    `task`: as that, one number an episode for all roles together. `state`: a role's episodes are compared,
    and beside that its turns that were asked the same."""
    step_weight: float = Field(default=1.0, ge=0)
    """With `group: state`: how much the comparison of turns that were asked the same counts beside that of
    episodes."""
    advantage: (
        Literal["group_norm", "group_mean", "leave_one_out", "batch_norm", "gae", "turn_gae"] | None
    ) = None
    singleton: Literal["skip", "role_baseline"] = "skip"
    """What happens to a group of one: no training, or the role's mean over other episodes as its baseline
    (of the same task, or of the step where the task has no other)."""
    ratio: Literal["token", "sequence"] | None = None
    """Probability ratios of single tokens, or one a turn: the geometric mean of its tokens' ratios."""
    clip: Literal["ppo", "cispo", "none"] | None = None
    """`ppo` takes the smaller of the plain and the clipped objective; `cispo` clips the ratio as a constant
    weight, so that every token keeps its gradient; `none` clips nothing."""
    clip_low: float | None = Field(default=None, gt=0)
    """Ratios are held above 1 - `clip_low`."""
    clip_high: float | None = Field(default=None, gt=0)
    """Ratios are held below 1 + `clip_high`."""
    dual_clip: float | None = Field(default=None, gt=1)
    """With a negative advantage the loss is at most this many times its absolute value."""
    importance: Importance | None = None
    updates_per_step: int | None = Field(default=None, ge=1)
    """Optimizer steps a pass over the batch: its tasks are split into that many mini-batches, episodes of one
    together; default: 1."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over the batch; default: 1."""
    turn_loss: Literal["mean", "sum"] | None = None
    sum_length: int | None = Field(default=None, ge=1)
    """With `turn_loss: sum`: the constant length; default: the role's `max_tokens`."""
    weight: Literal["episode", "token_mean", "episode_mean", "call_mean"] | None = None
    """What a turn's loss is divided by: the episodes, the batch's tokens, the episode's tokens, or the tokens
    of its call times the calls of its role in the episode (a call of a sub-workflow; outside of any the
    episode is one)."""
    negative_weight: float = Field(default=1.0, ge=0)
    """Factor on negative advantages; 0 trains on positive ones alone (biased)."""
    entropy: float = 0.0
    """Weight of a bonus for entropy, a nat; below 0 certainty is paid instead."""
    kl: Kl = Kl()
    overlong: Overlong | None = None
    dynamic: Dynamic | None = None
    critic: Critic | None = None
    gae: Gae | None = None


class Train(Spec):
    """The schedule of a run."""

    steps: int = Field(default=100, ge=0)
    tasks_per_step: int = Field(default=16, ge=1)
    eval_every: int | None = Field(default=None, ge=1)
    save_every: int | None = Field(default=None, ge=1)
    """Default: `eval_every`, else only at the end."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept beside the last, the start, and the best of those that were scored."""
    keep_every: int | None = Field(default=None, ge=1)
    """Every so many steps a checkpoint is saved that is never removed."""
    seed: int = 0
    shuffle: bool = True
    patience: int = Field(default=10, ge=1)
    """Stop with an error after this many consecutive steps without a learnable group, or with a
    trainable role that has no trainable turn."""
    optimizer: Optimizer = Optimizer()


class Eval(Spec):
    """How held-out rows are scored."""

    limit: int | None = Field(default=None, ge=1)
    samples: int = Field(default=0, ge=0)
    """Sampled episodes a task beside the greedy one."""
    metric: str | None = None
    """The reward whose mean is the headline; default: the first trajectory reward, else the first."""


def _passes(value: object) -> object:
    """Each entry is `NAME` or `{NAME: {settings}}`."""
    if not isinstance(value, (list, tuple)):
        raise Fault(
            "'passes' is a list", code="wrong-type", fix="write a list with entries like '- top_k: {k: 5}'"
        )
    entries: list[Any] = []
    for i, entry in enumerate(value):
        entry = {entry: {}} if isinstance(entry, str) else entry
        if not isinstance(entry, dict) or len(entry) != 1:
            fix = "write each pass as an entry of its own: '- NAME: {…}'"
            raise Fault("a pass is its name, or {name: {settings}}", code="bad-pass", fix=fix, path=(i,))
        name, settings = next(iter(entry.items()))
        if not isinstance(settings, (dict, type(None))):
            message = f"the settings of pass '{name}' are a mapping; got {settings!r}"
            raise Fault(message, code="bad-pass", fix=f"write {{{name}: {{…}}}}", path=(i, name))
        entries.append({name: settings or {}})
    return tuple(entries)


class Experiment(Spec):
    """A whole experiment."""

    workflow: Annotated[Annotated[str, Tag("<name>")] | Annotated[WorkflowUse, Tag("<inline>")], Either]
    mapping: Annotated[Annotated[str, Tag("<name>")] | Annotated[Mapping, Tag("<inline>")], Either]
    runtime: Annotated[Annotated[str, Tag("<name>")] | Annotated[Runtime, Tag("<inline>")], Either] = (
        Runtime()
    )
    base: Annotated[Annotated[str, Tag("<name>")] | Annotated[ConfigBase, Tag("<inline>")], Either] | None = (
        None
    )
    data: Data = Data()
    init: str | None = None
    """`RUN` or `RUN@step`; the warm start is then left out."""
    warm_start: WarmStart | None = None
    algorithm: Algorithm = Algorithm()
    passes: Annotated[tuple[dict[str, Any], ...], BeforeValidator(_passes)] = ()
    train: Train = Train()
    eval: Eval = Eval()
    summary: str = ""
