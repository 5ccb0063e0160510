"""Every algorithm without a critic against the formula of its paper, written out in float64.

A team of two roles has spoken: 4 tasks, 3 episodes each, replies of different lengths whose sampled
log-probs are off the trainer's. From the scored episodes on, the code under test makes groups, advantages,
weights, losses and 4 optimizer steps (2 passes over 2 mini-batches). The reference does the same with loops,
whole logits and autograd, and the weights must be equal in the end. Both are asked whether ratios left 1
and clips decided, so that what is off-policy is really compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from masflow.compiler import compile_experiment
from masflow.compiler.plan import Plan
from masflow.models.backbone import Backbone
from masflow.models.experience import Row
from masflow.models.trainer import Learner, Trainer
from masflow.rl.batch import build_batch
from masflow.rl.losses import LossSpec
from masflow.spec.mapping import Optimizer
from masflow.trace import EpisodeKey, Scored, Step, Trajectory, Turn

Toy = Callable[..., Path]
GRPO = "algorithm: {use: grpo, samples: 4, updates_per_step: 2}"
TEMPERATURE = 0.7
MAX_TOKENS = 7
SPEC = Optimizer(lr=1e-2, max_grad_norm=0.5, weight_decay=0.01)


@dataclass(frozen=True)
class Spoken:
    """One turn: all that a formula knows."""

    turn: Turn
    row: Row
    slot: int
    episode: str
    reward: float


def team(seed: int = 0) -> tuple[list[Scored], list[Spoken]]:
    """Two roles, the second of which speaks once or twice; rewards of 0 to 1, some groups of equal ones."""
    rng = np.random.default_rng(seed)
    scored, spoken = [], []
    for slot in range(4):
        for sample in range(3):
            key = EpisodeKey(0, "train", 1, slot, f"t{slot}", sample)
            mine: list[Spoken] = []
            places = [("caller", 1), ("echoer", 1), ("echoer", 2)][: 2 + (slot + sample) % 2]
            for superstep, (role, visit) in enumerate(places):
                path = (Step("", role, visit),)
                reply = tuple(int(i) for i in rng.integers(0, 30, size=int(rng.integers(1, MAX_TOKENS + 1))))
                turn = Turn(
                    key.turn_id(path), path, role, role, role, "policy", superstep, (), "", "", True, "ok",
                    temperature=TEMPERATURE, reply_tokens=len(reply),
                )  # fmt: skip
                prompt = tuple(int(i) for i in rng.integers(0, 30, size=3))
                row = Row(turn.id, "policy", prompt, reply, (), 0, "", "", TEMPERATURE)
                reward = 0.5 if slot == 1 else float(rng.integers(0, 5)) / 4
                mine.append(Spoken(turn, row, slot, key.episode_id, reward))
            trajectory = Trajectory(key, {}, tuple(one.turn for one in mine), (), "ok", "", {})
            totals: dict[str, float | None] = {one.turn.id: one.reward for one in mine}
            scored.append(Scored(trajectory, {}, totals, {}))
            spoken += mine
    return scored, spoken


def network() -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def logprobs_of(model: Any, row: Row) -> Tensor:
    """(T,) of the reply's tokens, all logits at once."""
    ids = torch.tensor([row.prompt_ids + row.reply_ids])
    all_TV = torch.log_softmax(model(ids).logits[0] / TEMPERATURE, -1)[len(row.prompt_ids) - 1 : -1]
    return all_TV.gather(1, torch.tensor(row.reply_ids)[:, None])[:, 0]


def off_policy(spoken: list[Spoken], model: Any, spread: float) -> list[Spoken]:
    """As an engine that is a little off had sampled them."""
    found, rng = [], np.random.default_rng(9)
    for one in spoken:
        with torch.no_grad():
            own = logprobs_of(model, one.row).numpy()
        sampled = tuple(map(float, own + rng.normal(0, spread, size=len(own))))
        found.append(replace(one, row=replace(one.row, logprobs=sampled)))
    return found


# -- the papers' formulas -------------------------------------------------------------------------

Advantage = Callable[[Spoken, list[Spoken]], float]
"""(turn, all turns of the step) → its advantage."""
Objective = Callable[[Tensor, Tensor, float], Tensor]
"""(logp, old logp, advantage), each (T,) → the loss of each token."""
Scale = Callable[[Spoken, list[Spoken]], float]
"""(turn, turns of its mini-batch) → factor of each of its tokens' losses."""


def group_of(one: Spoken, every: list[Spoken]) -> np.ndarray:
    """Same task, same role, same visit: what a question of one agent was answered with."""
    return np.array([o.reward for o in every if (o.slot, o.turn.path) == (one.slot, one.turn.path)])


def z_score(one: Spoken, every: list[Spoken]) -> float:
    rewards = group_of(one, every)
    if len(rewards) < 2:
        return math.nan
    return 0.0 if np.ptp(rewards) == 0 else (one.reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)


def less_mean(one: Spoken, every: list[Spoken]) -> float:
    rewards = group_of(one, every)
    return math.nan if len(rewards) < 2 else one.reward - rewards.mean()


def less_others(one: Spoken, every: list[Spoken]) -> float:
    rewards = group_of(one, every)
    n = len(rewards)
    return math.nan if n < 2 else one.reward - (rewards.sum() - one.reward) / (n - 1)


def overlong(one: Spoken) -> Spoken:
    """DAPO, eq. 13, with L_max = 7 and L_cache = 1 (a fifth of 7, rounded down): 6 cost 0, 7 cost 1."""
    return replace(one, reward=one.reward - (1.0 if one.turn.reply_tokens == 7 else 0.0))


def clipped(low: float, high: float) -> Objective:
    def loss(lp_T: Tensor, old_T: Tensor, a: float) -> Tensor:
        r_T = (lp_T - old_T).exp()
        return -torch.min(r_T * a, r_T.clamp(1 - low, 1 + high) * a)

    return loss


def gspo(lp_T: Tensor, old_T: Tensor, a: float) -> Tensor:
    """Eq. 5 to 7: one s = (π/π_old)^(1/|y|) a reply; its gain is the loss of the whole reply, so that of
    each of its |y| tokens, which are averaged."""
    s = (lp_T.sum() - old_T.sum()).div(len(lp_T)).exp()
    return -torch.min(s * a, s.clamp(1 - 0.0003, 1 + 0.0004) * a).expand(len(lp_T))


def cispo(lp_T: Tensor, old_T: Tensor, a: float) -> Tensor:
    """Eq. 4 and 5: sg(min(r, 5)) A log π."""
    return -(lp_T - old_T).exp().clamp(0, 5).detach() * a * lp_T


def per_turn(one: Spoken, mini: list[Spoken]) -> float:
    """GRPO, eq. 3: a mean over a reply's tokens, then over the episodes."""
    return 1 / len({o.episode for o in mini}) / one.turn.reply_tokens


def constant(one: Spoken, mini: list[Spoken]) -> float:
    """Dr. GRPO: the tokens' sum over a constant, the generation budget."""
    return 1 / len({o.episode for o in mini}) / MAX_TOKENS


def per_token(one: Spoken, mini: list[Spoken]) -> float:
    """DAPO, eq. 8: a mean over all tokens of the batch, of flat groups and lone turns too."""
    return 1 / sum(o.turn.reply_tokens for o in mini)


FORMULAS: dict[str, tuple[Advantage, Objective, Scale]] = {
    "grpo": (z_score, clipped(0.2, 0.2), per_turn),
    "dr_grpo": (less_mean, clipped(0.2, 0.2), constant),
    "dapo": (z_score, clipped(0.2, 0.28), per_token),
    "rloo": (less_others, clipped(0.2, 0.2), per_turn),
    "gspo": (z_score, gspo, per_turn),
    "cispo": (z_score, cispo, per_token),
}


def by_formula(name: str, spoken: list[Spoken], model: Any, weights: dict[str, Tensor] | None = None) -> None:
    """Four steps of the model. `weights`: turn id → (T,) factors of its tokens' losses."""
    advantage, objective, scale = FORMULAS[name]
    shaped = [overlong(o) for o in spoken] if name == "dapo" else spoken
    worth = {o.turn.id: advantage(o, shaped) for o in shaped}

    def loss(mini: list[Spoken]) -> Tensor:
        parts = []
        for one in mini:
            if math.isnan(worth[one.turn.id]):
                continue  # alone in its group: it has no baseline
            old_T = torch.tensor(one.row.logprobs, dtype=torch.float64)
            tokens_T = objective(logprobs_of(model, one.row), old_T, worth[one.turn.id])
            if weights is not None:
                tokens_T = tokens_T * weights[one.turn.id]
            parts.append(scale(one, mini) * tokens_T.sum())
        return torch.stack(parts).sum()

    four_steps(model, loss, spoken)


def four_steps(model: Any, loss: Callable[[list[Spoken]], Tensor], spoken: list[Spoken]) -> None:
    """Two passes over two mini-batches (tasks 0 and 1, then 2 and 3), AdamW on clipped gradients."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=SPEC.lr, betas=SPEC.betas, eps=SPEC.eps, weight_decay=SPEC.weight_decay
    )
    for slots in ((0, 1), (2, 3)) * 2:
        optimizer.zero_grad()
        loss([o for o in spoken if o.slot in slots]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SPEC.max_grad_norm)
        optimizer.step()


# -- the code under test --------------------------------------------------------------------------


def planned(toy: Toy, algorithm: str) -> Plan:
    """A plan of the toy's two roles, replies of up to 7 tokens."""
    long = (("reply: {max_tokens: 3,", f"reply: {{max_tokens: {MAX_TOKENS},"), ("3}}", f"{MAX_TOKENS}}}}}"))
    return compile_experiment(toy((GRPO, f"algorithm: {{{algorithm}, samples: 3}}"), workflow=long))


def by_masflow(
    plan: Plan, scored: list[Scored], spoken: list[Spoken], model: Any, where: Path
) -> dict[str, float]:
    """Groups, weights and updates, as a run makes them; the update's metrics."""
    batch = build_batch(plan, scored, len(scored), 1)
    [items] = batch.rows.values()
    row_of = {one.turn.id: one.row for one in spoken}
    rows = [row_of[item.turn_id] for item in items]
    backbone = Backbone(model)
    learner = Learner("policy", dict(model.named_parameters()))
    loss = LossSpec.from_algorithm(plan.algorithm)
    if loss.kl_weight:
        learner.has_reference = True
        learner.reference = {n: p.detach().clone() * 1.1 for n, p in learner.parameters.items()}
    trainer = Trainer(backbone, where)
    return trainer.update(learner, items, rows, loss, SPEC, 0, 1)


def distance(a: Any, b: Any) -> float:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


TWICE = "epochs: 2, updates_per_step: 2"


@pytest.mark.parametrize("name", FORMULAS)
def test_weights_after_four_steps_are_those_of_the_papers_formula(toy: Toy, tmp_path: Path, name: str):
    scored, spoken = team()
    ours, theirs, start = network(), network(), network()
    spoken = off_policy(spoken, start, 0.2)
    metrics = by_masflow(planned(toy, f"use: {name}, {TWICE}"), scored, spoken, ours, tmp_path)
    by_formula(name, spoken, theirs)
    assert distance(ours, theirs) < 1e-8 < 1e-3 < distance(ours, start)
    assert metrics["optimizer_steps"] == 4
    assert abs(metrics["ratio"] - 1) > 1e-3, "every ratio is 1: nothing off-policy was compared"
    assert name == "cispo" or metrics["clip_frac"] > 0.05


def moved(model: Any) -> Any:
    """The same network with weights a tenth larger: a reference that isn't the policy."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    return model


def test_reinforce_pp_pays_each_token_for_its_divergence_to_come_and_whitens_the_roles_tokens(
    toy: Toy, tmp_path: Path
):
    """REINFORCE++, eq. 8 to 10: A_t = r - 0.01 Σ_{i ≥ t} log π_old / π_ref, normalised over all tokens of
    the role's batch, whatever task; then PPO's clip."""
    scored, spoken = team()
    ours, theirs, start = network(), network(), network()
    spoken = off_policy(spoken, start, 0.2)
    metrics = by_masflow(planned(toy, f"use: reinforce_pp, {TWICE}"), scored, spoken, ours, tmp_path)
    reference, raw = moved(network()), {}
    for one in spoken:
        with torch.no_grad():
            gaps = np.array(one.row.logprobs) - logprobs_of(reference, one.row).numpy()
        raw[one.turn.id] = one.reward - 0.01 * gaps[::-1].cumsum()[::-1]
    worth = {}
    for one in spoken:
        mine = np.concatenate([raw[o.turn.id] for o in spoken if o.turn.role == one.turn.role])
        worth[one.turn.id] = torch.tensor((raw[one.turn.id] - mine.mean()) / (mine.std() + 1e-8))

    def loss(mini: list[Spoken]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for one in mini:
            a_T = worth[one.turn.id]
            r_T = (logprobs_of(theirs, one.row) - torch.tensor(one.row.logprobs, dtype=torch.float64)).exp()
            tokens_T = -torch.min(r_T * a_T, r_T.clamp(0.8, 1.2) * a_T)
            total = total + per_turn(one, mini) * tokens_T.sum()
        return total

    four_steps(theirs, loss, spoken)
    assert distance(ours, theirs) < 1e-8 < 1e-3 < distance(ours, start)
    assert abs(metrics["ratio"] - 1) > 1e-3 and metrics["clip_frac"] > 0.05


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_importance_weights_correct_what_the_engine_was_off_and_the_mismatch_is_told(
    toy: Toy, tmp_path: Path, name: str
):
    """Ratios are taken against the trainer's own log-probs; each token weighs min(own / engine, 1.1)."""
    scored, spoken = team()
    ours, theirs, start = network(), network(), network()
    spoken = off_policy(spoken, start, 0.2)
    plan = planned(toy, f"use: {name}, {TWICE}, importance: {{cap: 1.1}}")
    metrics = by_masflow(plan, scored, spoken, ours, tmp_path)
    own, weights, ratios = [], {}, []
    for one in spoken:
        with torch.no_grad():
            own_T = logprobs_of(start, one.row)
        ratio_T = (own_T - torch.tensor(one.row.logprobs, dtype=torch.float64)).exp()
        weights[one.turn.id] = ratio_T.clamp(max=1.1)
        own.append(replace(one, row=replace(one.row, logprobs=tuple(own_T.tolist()))))
        if not math.isnan(FORMULAS[name][0](one, spoken)) and z_score(one, spoken):
            ratios.append(ratio_T)
    by_formula(name, own, theirs, weights)
    assert distance(ours, theirs) < 1e-8 < 1e-3 < distance(ours, start)
    r_N = torch.cat(ratios).numpy()  # of the rows that were trained on: those with an advantage
    assert metrics["tis_mean"] == pytest.approx(np.minimum(r_N, 1.1).mean())
    assert metrics["tis_frac"] == pytest.approx((r_N > 1.1).mean()) and metrics["tis_frac"] > 0.1
    assert metrics["mismatch"] == pytest.approx((r_N - 1 - np.log(r_N)).mean())
    assert metrics["old_gap"] == pytest.approx(np.abs(np.log(r_N)).mean())


def test_kl_and_entropy_stay_exact_beside_a_clip_of_whole_turns(toy: Toy, tmp_path: Path):
    """GSPO with k3 against a reference (weight 0.3) and an entropy bonus (0.1): all turns train, lone ones
    have no baseline and stay out."""
    scored, spoken = team()
    ours, theirs, start = network(), network(), network()
    spoken = off_policy(spoken, start, 0.2)
    more = "kl: {weight: 0.3, estimator: k3}, entropy: 0.1"
    by_masflow(planned(toy, f"use: gspo, {TWICE}, {more}"), scored, spoken, ours, tmp_path)
    reference = moved(network())

    def loss(mini: list[Spoken]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for one in mini:
            a = z_score(one, spoken)
            if math.isnan(a):
                continue
            ids = torch.tensor([one.row.prompt_ids + one.row.reply_ids])
            all_TV = torch.log_softmax(theirs(ids).logits[0] / TEMPERATURE, -1)
            all_TV = all_TV[len(one.row.prompt_ids) - 1 : -1]
            lp_T = all_TV.gather(1, torch.tensor(one.row.reply_ids)[:, None])[:, 0]
            with torch.no_grad():
                ref_T = logprobs_of(reference, one.row)
            tokens_T = gspo(lp_T, torch.tensor(one.row.logprobs, dtype=torch.float64), a)
            tokens_T = tokens_T + 0.3 * ((ref_T - lp_T).exp() - (ref_T - lp_T) - 1)
            tokens_T = tokens_T + 0.1 * (all_TV.exp() * all_TV).sum(-1)
            total = total + per_turn(one, mini) * tokens_T.sum()
        return total

    four_steps(theirs, loss, spoken)
    assert distance(ours, theirs) < 1e-8 < 1e-3 < distance(ours, start)


def test_the_formulas_differ_so_that_agreeing_with_one_says_something():
    _, spoken = team()
    spoken, ends = off_policy(spoken, network(), 0.2), []
    for name in FORMULAS:
        ends.append(network())
        by_formula(name, spoken, ends[-1])
    assert min(distance(a, b) for i, a in enumerate(ends) for b in ends[:i]) > 1e-4


def test_what_is_compared_has_lessons_flat_groups_lone_turns_and_long_replies():
    _, spoken = team()
    worth = [z_score(one, spoken) for one in spoken]
    assert any(math.isnan(a) for a in worth) and 0.0 in worth and any(a > 0.5 for a in worth)
    assert any(one.turn.reply_tokens == MAX_TOKENS for one in spoken)
