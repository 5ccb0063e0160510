"""Every algorithm with a critic against its paper's formula in float64: the weights after four steps.

The same spoken team as in `test_references`. The critic's values are taken by transformers' own pass, one
row at a time; advantages are the papers' sums, written as sums; the loss is PPO's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from masflow.models.backbone import Backbone
from masflow.models.critic import Critic
from masflow.models.critics import Critics
from masflow.models.trainer import Learner, Trainer
from masflow.rl.batch import build_batch, minibatches
from masflow.rl.chains import critic_groups, links_of
from masflow.rl.groups import entrants_of
from masflow.rl.losses import LossSpec
from masflow.trace import Message, Scored
from tests.algorithms.test_references import (
    SPEC,
    TWICE,
    Spoken,
    distance,
    four_steps,
    logprobs_of,
    network,
    off_policy,
    per_turn,
    planned,
    team,
)

Toy = Callable[..., Path]
GAMMA, LAM = 0.9, 0.8
WORDS = ("say red", "hear green blue", "hear pink")


def asked() -> tuple[list[Scored], list[Spoken]]:
    """The team, with words in prompts and replies: a central critic reads them."""
    scored, spoken = team()
    turns = {}
    for number, one in enumerate(spoken):
        said = (Message("user", WORDS[number % 3]),)
        turns[one.turn.id] = replace(one.turn, messages=said, text=WORDS[(number + 1) % 3])
    told = [
        replace(s, trajectory=replace(s.trajectory, turns=tuple(turns[t.id] for t in s.trajectory.turns)))
        for s in scored
    ]
    return told, [replace(one, turn=turns[one.turn.id]) for one in spoken]


def state_values(critic: Critic, role: str, ids: list[int], first: int, count: int) -> np.ndarray:
    """Of the states before `count` tokens, of which the first is number `first`."""
    with torch.no_grad():
        states = critic.backbone.model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        place = critic.spec.roles.index(role)
        values = states[first - 1 : first - 1 + count] @ critic.head.weight[place] + critic.head.bias[place]
    return values.numpy()


def whitened(raw: dict[str, np.ndarray], spoken: list[Spoken]) -> dict[str, np.ndarray]:
    found = {}
    for one in spoken:
        every = np.concatenate([raw[o.turn.id] for o in spoken if o.turn.role == one.turn.role])
        found[one.turn.id] = (raw[one.turn.id] - every.mean()) / every.std(ddof=1)
    return found


def of_tokens(critics: dict[str, Critic], spoken: list[Spoken]) -> dict[str, np.ndarray]:
    """A_t = Σ_k (γλ)^k δ_{t+k}; the reward comes with the last token (arXiv 1506.02438, eq. 16)."""
    raw = {}
    for one in spoken:
        prompt, reply = list(one.row.prompt_ids), list(one.row.reply_ids)
        size = len(reply)
        v = [*state_values(critics[one.turn.role], one.turn.role, prompt + reply, len(prompt), size), 0.0]
        deltas = [(one.reward if t == size - 1 else 0.0) + GAMMA * v[t + 1] - v[t] for t in range(size)]
        raw[one.turn.id] = np.array(
            [sum((GAMMA * LAM) ** k * deltas[t + k] for k in range(size - t)) for t in range(size)]
        )
    return whitened(raw, spoken)


def of_chains(critics: dict[str, Critic], spoken: list[Spoken], crosses: bool) -> dict[str, np.ndarray]:
    """A_n = Σ_k λ^k δ_{n+k} along one role's turns in an episode, or the whole team's; what a turn brings is
    its credit less its successor's."""
    raw = {}
    for one in spoken:
        chain = [
            o
            for o in spoken
            if o.episode == one.episode and (crosses or o.turn.role == one.turn.role)
            and o.turn.superstep >= one.turn.superstep
        ]  # fmt: skip
        v = [value_of(critics[o.turn.role], o, spoken, crosses) for o in chain] + [0.0]
        credit = [o.reward for o in chain] + [0.0]
        deltas = [credit[n] - credit[n + 1] + v[n + 1] - v[n] for n in range(len(chain))]
        raw[one.turn.id] = np.array([sum(LAM**k * delta for k, delta in enumerate(deltas))])
    return whitened(raw, spoken)


def value_of(critic: Critic, one: Spoken, spoken: list[Spoken], is_central: bool) -> float:
    """Of what a turn was asked; a central critic reads the other roles' last words, then the question."""
    ids = list(one.row.prompt_ids)
    if is_central:
        latest: dict[str, Spoken] = {}
        for o in spoken:
            if o.episode == one.episode and o.turn.superstep < one.turn.superstep:
                latest[o.turn.role] = o
        latest.pop(one.turn.role, None)
        parts = [
            f"[{r}]\n{latest[r].turn.messages[0].content}\n{latest[r].turn.text}"
            for r in ("caller", "echoer")
            if r in latest
        ]
        text = "\n".join([*parts, f"[{one.turn.role}]\n{one.turn.messages[0].content}"])
        ids = critic.tokenizer(text, add_special_tokens=False)["input_ids"]
    return float(state_values(critic, one.turn.role, ids, len(ids), 1)[0])


@pytest.mark.parametrize("name", ["ppo", "turn_ppo", "ippo", "mappo"])
def test_weights_after_four_steps_are_those_of_the_papers_formula(toy: Toy, tmp_path: Path, name: str):
    scored, spoken = asked()
    ours, theirs, start = network(), network(), network()
    spoken = off_policy(spoken, start, 0.2)
    gamma = f"gamma: {GAMMA}, " if name == "ppo" else ""
    plan = planned(toy, f"use: {name}, {TWICE}, gae: {{{gamma}lam: {LAM}}}")
    (model,) = plan.models
    critics = Critics(model, plan, tmp_path)
    generator = torch.Generator().manual_seed(5)
    for critic in critics.by_name.values():
        critic.backbone.model.double()
        critic.head.double()
        with torch.no_grad():
            critic.head.weight.copy_(torch.randn(critic.head.weight.shape, generator=generator) * 0.3)
    by_role = {role: critic for critic in critics.by_name.values() for role in critic.spec.roles}

    entrants = entrants_of(plan, scored)
    minibatch_of, _ = minibatches(plan, scored)
    links = {c.name: links_of(plan, c, scored, entrants, minibatch_of) for c in plan.critics}
    rows = {one.turn.id: one.row for one in spoken}
    advantages = critics.estimate(links, rows)
    groups = critic_groups(plan.critics, entrants, advantages)
    [items] = build_batch(plan, scored, len(scored), 1, entrants, groups).rows.values()
    learner, loss = Learner("policy", dict(ours.named_parameters())), LossSpec.from_algorithm(plan.algorithm)
    metrics = Trainer(Backbone(ours), tmp_path).update(
        learner, items, [rows[item.turn_id] for item in items], loss, SPEC, 0, 1,
        token_advantages=critics.token_advantages,
    )  # fmt: skip

    worth = (
        of_tokens(by_role, spoken) if name == "ppo" else of_chains(by_role, spoken, crosses=name == "mappo")
    )

    def by_formula(mini: list[Spoken]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for one in mini:
            a_T = torch.from_numpy(worth[one.turn.id])
            r_T = (logprobs_of(theirs, one.row) - torch.tensor(one.row.logprobs, dtype=torch.float64)).exp()
            total = total - per_turn(one, mini) * torch.min(r_T * a_T, r_T.clamp(0.8, 1.2) * a_T).sum()
        return total

    four_steps(theirs, by_formula, spoken)
    assert distance(ours, theirs) < 1e-6 < 1e-3 < distance(ours, start)
    assert metrics["optimizer_steps"] == 4
    assert abs(metrics["ratio"] - 1) > 1e-3 and metrics["clip_frac"] > 0.05
    with torch.no_grad():
        for critic in critics.by_name.values():
            critic.head.weight.zero_()
    plain = of_tokens(by_role, spoken) if name == "ppo" else of_chains(by_role, spoken, name == "mappo")
    assert max(float(np.abs(a - plain[i]).max()) for i, a in worth.items()) > 0.05, "values decide nothing"
