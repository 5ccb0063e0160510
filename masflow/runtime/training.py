"""One training step: the operators of its stages, looked up by name, and what a step reports.

    sample → score → credit → group → advantage → select → update → evolve

Each operator reads and fills a `Work`; the plan says which stands at which stage. Knows no tensors.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from masflow.algorithms.critics import critic_of
from masflow.compiler.plan import Plan, StageIR
from masflow.compiler.rows import Task
from masflow.errors import RunError, closest
from masflow.rl.batch import Batch, build_batch, minibatches
from masflow.rl.chains import critic_groups, links_of
from masflow.rl.groups import entrants_of, learnable_slots, shaped
from masflow.rl.losses import LossSpec
from masflow.rl.nodes import Credited, credit_actions, value_actions
from masflow.rl.score import Scoring
from masflow.rl.selection import Chosen, choose, selected, summary
from masflow.runtime.episodes import answers_of, play
from masflow.runtime.evaluate import by_source, mean, roles
from masflow.runtime.judge import judge_of
from masflow.runtime.memories import Memories, view_of
from masflow.runtime.nodes import Drawn, NodeSampler
from masflow.runtime.player import Player
from masflow.runtime.schedule import Mixture
from masflow.runtime.state import EpisodeState
from masflow.runtime.team import Team
from masflow.spec.experiment import Overlong
from masflow.tools import ToolBox
from masflow.trace import EpisodeKey, Scored, Trajectory


@dataclass
class Work:
    """What one step makes, filled from stage to stage."""

    plan: Plan
    team: Team
    toolbox: ToolBox
    tasks: Sequence[Task]
    step: int
    """From 1."""
    position: int
    """Task rows drawn before this step."""
    num_tasks: int = 0
    """Task rows drawn in this step."""
    kept: list[int] | None = None
    """With dynamic sampling: slots of the tasks that are trained on, in task order."""
    rounds: int = 1
    """Of drawing tasks."""
    num_episodes: int = 0
    """Scheduled for the step: E."""
    sources: list[int] = field(default_factory=list)
    """Of each slot's task: which of the split's sources it comes from."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """With node sampling: the base episodes."""
    drawn: Drawn | None = None
    """With node sampling: what was drawn at their turns."""
    credited: Credited | None = None
    memories: Memories | None = None
    """What roles remember; with `memory_evolution`."""
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    """Store → records, and what happened to them in the step."""
    scoring: Scoring = field(init=False)
    """Episodes' rewards begin as they end."""
    scored: list[Scored] = field(default_factory=list)
    batch: Batch | None = None
    chosen: list[Chosen] | None = None
    """With `top_k`: every group, and whether it is trained on."""
    unselected: Batch | None = None
    """With `top_k`: the batch with the rows of all groups."""
    policies: dict[str, dict[str, float]] = field(default_factory=dict)
    """Policy → metrics of its update."""
    critics: dict[str, dict[str, float]] = field(default_factory=dict)
    """Critic → metrics of its update."""
    traffic: dict[str, float] = field(default_factory=dict)
    """Of this step: `concurrency`, `forked_rows`, `hub_bytes`."""
    served: dict[str, dict[str, int]] = field(default_factory=dict)
    """Model behind an endpoint → what was asked of it in this step, judges' questions included."""
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scoring = Scoring(self.plan)

    def played(self) -> list[Scored]:
        """Everything that was played, for the trace: forks too, each with what is its own."""
        return [*self.scored, *(self.credited.forks if self.credited else ())]

    def advantages(self) -> dict[str, float]:
        """Turn id → advantage, of the turns that are trained on."""
        assert self.batch is not None
        return {row.turn_id: row.advantage for rows in self.batch.rows.values() for row in rows}


Operator = Callable[[Work, dict[str, Any]], None]


def sample_trajectories(work: Work, options: dict[str, Any]) -> None:
    """Draw the next tasks and play `samples` episodes of each under the current policies."""
    work.trajectories = _drawn(work, work.plan.train.tasks_per_step)


def _drawn(work: Work, num_tasks: int) -> list[Trajectory]:
    """Whole episodes of the next tasks; their rewards have begun."""
    player, states = _started(work, work.plan.sampler.samples, num_tasks)
    work.num_episodes += len(states)
    return play(player, states, answers_of(work.team), work.scoring.begin)


def sample_nodes(work: Work, options: dict[str, Any]) -> None:
    """Draw the next tasks; play one episode of each and `samples` actions at its turns."""
    player, states = _started(work, 1, work.plan.train.tasks_per_step)
    work.num_episodes = len(states) * work.plan.sampler.samples
    if work.plan.sampler.options.get("advance") == "best":  # all candidates are judged before anyone goes on
        value = partial(value_actions, work.plan, judge=judge_of(work.plan, work.team.generate))
        sampler = NodeSampler(work.plan, player, work.team.generate, value)
    else:
        sampler = NodeSampler(work.plan, player, answers_of(work.team))
    work.drawn = sampler.sample(states)
    work.trajectories = work.drawn.bases


def _started(work: Work, samples: int, num_tasks: int) -> tuple[Player, list[EpisodeState]]:
    """Episodes on the next tasks, nothing asked yet; by task, then sample."""
    plan, first = work.plan, work.num_tasks
    mixture = Mixture.of([s.weight for s in plan.data["train"]], [task.source for task in work.tasks])
    picked = mixture.draw(work.position + first, num_tasks, plan.train.seed, plan.train.shuffle)
    work.num_tasks += num_tasks
    work.sources += [work.tasks[row].source for row in picked]
    player = Player(plan, work.toolbox, mode="train", memory=view_of(work.memories))
    states = [
        player.start(
            work.tasks[row].row,
            EpisodeKey(plan.train.seed, "train", work.step, slot, work.tasks[row].id, sample),
        )
        for slot, row in enumerate(picked, first)
        for sample in range(samples)
    ]
    return player, states


def score_rewards(work: Work, options: dict[str, Any]) -> None:
    """Run the reward functions; give every turn what it is credited with."""
    judge = judge_of(work.plan, work.team.generate)
    work.scored = work.scoring.finish(work.trajectories, judge)
    if work.drawn is not None:
        is_local = work.plan.sampler.options["credit"] == "local"
        ways = work.drawn.continuations
        work.credited = credit_actions(work.plan, work.scored, ways, is_local, judge)


def make_batch(work: Work, options: dict[str, Any]) -> None:
    """Group turns, subtract baselines, weigh: rows for every policy."""
    entrants = work.credited.entrants if work.credited else None
    work.batch = build_batch(work.plan, work.scored, work.num_episodes, work.step, entrants)


def redraw(work: Work, options: dict[str, Any]) -> None:
    """Dynamic sampling (DAPO, arXiv 2503.14476, eq. 11): tasks without a learnable group are left out, and as
    many further ones are drawn, until the step has `tasks_per_step` of them or `max_rounds` are over.

    What counts is the place in the order of tasks: every task of a round is played to its end before one is
    chosen, so that quick episodes have no advantage. Rewards are judged as they are, without what long
    replies pay. Where no task is learnable the batch holds all of them, and says so.
    """
    plan, kept, fresh = work.plan, [], work.scored
    bare = replace(plan, algorithm=plan.algorithm.model_copy(update={"overlong": Overlong(penalty=0.0)}))
    while True:
        kept += learnable_slots(bare, fresh)
        missing = plan.train.tasks_per_step - len(kept)
        if not missing or work.rounds == options["max_rounds"]:
            break
        work.rounds += 1
        played = _drawn(work, missing)
        fresh = work.scoring.finish(played, judge_of(plan, work.team.generate))
        work.trajectories, work.scored = [*work.trajectories, *played], [*work.scored, *fresh]
    work.kept = kept
    if kept:
        chosen = [one for one in work.scored if one.trajectory.key.slot in set(kept)]
        work.batch = build_batch(plan, chosen, len(kept) * plan.sampler.samples, work.step)
    else:
        work.batch = build_batch(bare, work.scored, work.num_episodes, work.step)


def select_groups(work: Work, options: dict[str, Any]) -> None:
    """`top_k`: rows of groups that aren't selected are left out; what is counted and E stay as they are."""
    assert work.batch is not None
    entrants = work.credited.entrants if work.credited else entrants_of(work.plan, work.scored)
    work.unselected, work.chosen = work.batch, choose(work.batch.groups, entrants, **options)
    work.batch = selected(work.batch, work.chosen, work.step)


def ask_critics(work: Work, options: dict[str, Any]) -> None:
    """Chain turns, ask what critics expected of them, subtract it: rows for every policy."""
    plan, scored = work.plan, work.scored
    entrants = shaped(plan, entrants_of(plan, scored))
    minibatch_of, _ = minibatches(plan, scored)
    links = {c.name: links_of(plan, c, scored, entrants, minibatch_of) for c in plan.critics}
    advantages = work.team.estimate(links)
    groups = critic_groups(plan.critics, entrants, advantages)
    work.batch = build_batch(plan, scored, work.num_episodes, work.step, entrants, groups)


def update_policies(work: Work, options: dict[str, Any]) -> None:
    """Every policy with rows takes its optimizer steps and publishes; others do not move. Critics learn, in
    their first `warmup_steps` alone."""
    assert work.batch is not None
    algorithm, last = work.plan.algorithm, work.plan.train.steps
    critic, loss = critic_of(algorithm), LossSpec.from_algorithm(algorithm)
    is_warm = critic is None or work.step > critic.warmup_steps
    rows = work.batch.rows if is_warm else {}
    work.policies, work.critics = work.team.update_all(rows, loss, work.step - 1, last)
    work.team.clear_rows()


def evolve_memory(work: Work, options: dict[str, Any]) -> None:
    """Let every store learn from the step's turns; on the disk when this returns."""
    assert work.memories is not None
    work.memory = work.memories.evolve(work.step, work.played())


def nothing(work: Work, options: dict[str, Any]) -> None:
    """A stage that the one before has filled, or that nothing asks for."""


OPERATORS: dict[tuple[str, str], Operator] = {
    ("sample", "trajectories"): sample_trajectories,
    ("sample", "nodes"): sample_nodes,
    ("score", "rewards"): score_rewards,
    ("credit", "own"): nothing,
    ("credit", "return_to_go"): nothing,
    ("group", "task_role_path"): nothing,
    ("group", "task_role"): nothing,
    ("group", "task_call"): nothing,
    ("group", "task"): nothing,
    ("group", "state"): nothing,
    ("group", "siblings"): nothing,
    ("advantage", "group_norm"): make_batch,
    ("advantage", "group_mean"): make_batch,
    ("advantage", "leave_one_out"): make_batch,
    ("advantage", "batch_norm"): make_batch,
    ("advantage", "gae"): ask_critics,
    ("advantage", "turn_gae"): ask_critics,
    ("select", "all"): nothing,
    ("select", "dynamic"): redraw,
    ("select", "top_k"): select_groups,
    ("update", "clip"): update_policies,
    ("update", "sequence_clip"): update_policies,
    ("update", "cispo"): update_policies,
    ("update", "sequence_cispo"): update_policies,
    ("update", "ratio"): update_policies,
    ("update", "sequence_ratio"): update_policies,
    ("evolve", "none"): nothing,
    ("evolve", "memory"): evolve_memory,
}


def operator(stage: StageIR) -> Operator:
    """Raises RunError when the plan names an operator that nothing here provides."""
    found = OPERATORS.get((stage.name, stage.op))
    if found is None:
        known = [op for name, op in OPERATORS if name == stage.name]
        near = closest(stage.op, known)
        fix = f"use '{near}'" if near else f"use one of: {', '.join(known) or 'none'}"
        raise RunError(f"stage '{stage.name}' has no operator '{stage.op}'", fix)
    return found


def run_stages(work: Work, on_stage: Callable[[Work, str], None]) -> None:
    """The training step, in the order in which things happen.

    Args:
        on_stage: called after each stage with its name.
    """
    before, used = work.team.traffic(), work.team.usage()
    with work.scoring:
        for stage in work.plan.stages:
            began = time.perf_counter()
            operator(stage)(work, stage.options)
            work.seconds[stage.name] = time.perf_counter() - began
            work.traffic = work.team.traffic().since(before)
            work.served = work.team.usage(used)
            on_stage(work, stage.name)


def _nodes(work: Work) -> dict[str, dict[str, int]]:
    """With node sampling: what was drawn, and the continuations that count for nothing."""
    if work.drawn is None or work.credited is None:
        return {}
    return {"nodes": {**work.drawn.counts, "lost_continuations": work.credited.num_lost}}


def _choice(work: Work) -> dict[str, dict[str, int]]:
    """With dynamic sampling: rounds of drawing, tasks drawn, tasks trained on."""
    if work.kept is None:
        return {}
    return {"dynamic": {"rounds": work.rounds, "tasks": work.num_tasks, "kept": len(work.kept)}}


def _selection(work: Work) -> dict[str, Any]:
    """With `top_k`: how many groups of each role and node were selected, and tokens trained."""
    if work.chosen is None or work.batch is None or work.unselected is None:
        return {}
    tokens = {t.id: t.prompt_tokens + t.reply_tokens for one in work.played() for t in one.trajectory.turns}
    sizes = [
        sum(tokens[row.turn_id] for rows in batch.rows.values() for row in rows)
        for batch in (work.batch, work.unselected)
    ]
    return {"selection": {**summary(work.chosen), "trained_tokens": sizes[0], "all_tokens": sizes[1]}}


def step_record(work: Work) -> dict[str, Any]:
    """One line of metrics.jsonl. All that depends on the clock stands under `time`."""
    assert work.batch is not None
    total_s = sum(work.seconds.values())
    turns = (turn for one in work.played() for turn in one.trajectory.turns)
    tokens = sum(turn.reply_tokens + turn.prompt_tokens for turn in turns)
    names = [reward.name for reward in work.plan.graph.rewards]
    return {
        "kind": "train",
        "step": work.step,
        "episodes": work.num_episodes,
        "rewards": {name: mean(one.metrics.get(name) for one in work.scored) for name in names},
        "unscored": sum(bool(one.failures) for one in work.scored),
        "outcomes": dict(sorted(Counter(one.outcome for one in work.trajectories).items())),
        "roles": roles(work.plan, work.scored),
        **by_source(work.plan, "train", work.sources, work.scored),
        "batch": dict(work.batch.stats),
        **_choice(work),
        **_nodes(work),
        **_selection(work),
        **({"memory": work.memory} if work.memory else {}),
        "policies": work.policies,
        **({"critics": work.critics} if work.critics else {}),
        "tokens": tokens,
        **({"served": work.served} if work.served else {}),
        **work.traffic,
        "time": {
            **{f"{name}_s": round(seconds, 4) for name, seconds in work.seconds.items()},
            **work.scoring.seconds,
            "total_s": round(total_s, 4),
            "tokens_per_s": round(tokens / total_s, 1) if total_s else 0.0,
        },
    }
