"""A critic's values, losses and steps, against plain float64 references, and numbers worked out on paper."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from masflow.compiler.plan import CriticIR, ModelIR, Plan, PolicyIR
from masflow.errors import RunError
from masflow.models.bases import load_base
from masflow.models.critic import Critic, value_loss_N
from masflow.models.critics import Critics
from masflow.models.experience import Row
from masflow.rl.chains import Link
from masflow.spec.experiment import Algorithm, Gae
from masflow.spec.mapping import ConfigBase, Optimizer

ROLES = ("asker", "teller")
Make = Callable[..., Critic]


def host(base: ConfigBase, name: str = "m") -> ModelIR:
    optimizer = Optimizer(lr=1e-2)
    return ModelIR(name, base, "hash", "full", (PolicyIR(name, name, None, ROLES, True, optimizer),))


def spec_of(base: Any, name: str = "m", **fields: Any) -> CriticIR:
    return CriticIR(name, "m", ROLES, base, "hash", fields.pop("optimizer", Optimizer(lr=1e-2)), **fields)


@pytest.fixture
def critic(config_base: Callable[..., ConfigBase], tmp_path: Path) -> Make:
    """`critic(family, is_double, …)`: one with two heads; random ones, unless `zero`."""

    def make(family: str = "qwen3", is_double: bool = True, zero: bool = False, **fields: Any) -> Critic:
        base = config_base(family, freeze=fields.pop("freeze", ()))
        made = Critic(spec_of(base, **fields), host(base), tmp_path, seed=0)
        if is_double:
            made.backbone.model.double()
            made.head.double()
        if not zero:
            generator = torch.Generator().manual_seed(3)
            with torch.no_grad():
                made.head.weight.copy_(torch.randn(made.head.weight.shape, generator=generator) * 0.2)
                made.head.bias.copy_(torch.tensor([0.1, -0.2]))
        return made

    return make


def row(turn: str, prompt: Sequence[int], reply: Sequence[int]) -> Row:
    return Row(turn, "m", tuple(prompt), tuple(reply), (0.0,) * len(reply), 0, "", "")


# Two replies to one prompt, a turn that goes on from the first of them, and one that shares nothing.
SAID = [
    row("t0", (5, 6, 7), (8, 9)),
    row("t1", (5, 6, 7), (10, 11, 12)),
    row("t2", (5, 6, 7, 8, 9, 13), (7, 4)),
    row("t3", (14, 4), (6,)),
]
WHO = ("asker", "asker", "teller", "teller")


def links(rewards: Sequence[float], minibatches: Sequence[int] = (0, 0, 0, 0), **fields: Any) -> list[Link]:
    found = zip(SAID, WHO, rewards, minibatches, strict=True)
    return [Link(r.turn_id, who, reward, minibatch=m, **fields) for r, who, reward, m in found]


def by_id(rows: Sequence[Row] = SAID) -> Mapping[str, Row]:
    return {r.turn_id: r for r in rows}


def plain_values(model: Any, head: torch.nn.Linear, one: Row, who: str, whole_turn: bool = False) -> Any:
    """What the state before each reply token is worth, one row at a time, by transformers' own pass."""
    ids = torch.tensor([[*one.prompt_ids, *one.reply_ids]])
    states = model.base_model(input_ids=ids).last_hidden_state[0]
    first, count = len(one.prompt_ids) - 1, 1 if whole_turn else len(one.reply_ids)
    return states[first : first + count] @ head.weight[ROLES.index(who)] + head.bias[ROLES.index(who)]


# -- the loss -------------------------------------------------------------------------------------


def test_the_value_loss_by_hand():
    # Held at 0.2: (0.2 - 1)² = 0.64 beats (0.5 - 1)² = 0.25. Below, (-0.5 - 1)² = 2.25 beats (-0.2 - 1)².
    values = torch.tensor([0.5, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
    old, targets = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    loss, clipped = value_loss_N(values, old, targets, 0.2)
    assert loss.tolist() == pytest.approx([0.32, 1.125, 0.405])
    assert clipped.tolist() == [True, False, False]
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -1.5, -0.9])


def test_without_a_clip_it_is_half_the_square():
    values = torch.tensor([0.5, 9.0], requires_grad=True)
    loss, clipped = value_loss_N(values, torch.zeros(2), torch.ones(2), None)
    assert loss.tolist() == [0.125, 32.0]
    assert not clipped.any()


# -- values ---------------------------------------------------------------------------------------


def test_values_begin_at_zero(critic: Make):
    values = critic(is_double=False, zero=True).values(SAID, links([0] * 4))
    assert [v.tolist() for v in values] == [[0, 0], [0, 0, 0], [0, 0], [0]]


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_values_are_those_of_each_row_alone_by_its_roles_head(critic: Make, family: str):
    made = critic(family)
    found = made.values(SAID, links([0] * 4))
    for one, who, values in zip(SAID, WHO, found, strict=True):
        wanted = plain_values(made.backbone.model, made.head, one, who).detach().numpy()
        assert values == pytest.approx(wanted, abs=1e-12)
        assert np.abs(values).max() > 0.01


# -- estimates ------------------------------------------------------------------------------------


def test_advantages_of_tokens_are_whitened_a_role_by_hand(critic: Make):
    # Values are 0, λ 0.5, gamma 1: a reply of two tokens paid 1 has 0.5, 1; one of three paid 0 has 0, 0, 0.
    made = critic(zero=True).estimate(links([1, 0, 2, 0]), by_id(), True, Gae(lam=0.5))
    assert [a.tolist() for a in made.targets] == [[0.5, 1.0], [0.0, 0.0, 0.0], [1.0, 2.0], [0.0]]
    asker, teller = np.array([0.5, 1, 0, 0, 0]), np.array([1.0, 2, 0])
    wanted = [(x - x.mean()) / x.std(ddof=1) for x in (asker, teller)]
    assert np.concatenate(made.advantages[:2]) == pytest.approx(wanted[0], abs=1e-7)
    assert np.concatenate(made.advantages[2:]) == pytest.approx(wanted[1], abs=1e-7)


def test_advantages_of_tokens_subtract_what_the_critic_expected(critic: Make):
    critic_ = critic()
    made = critic_.estimate(links([1, 0, 2, 0]), by_id(), True, Gae(lam=1.0))
    values = critic_.values(SAID, links([0] * 4))
    raw = [reward - v for reward, v in zip([1, 0, 2, 0], values, strict=True)]  # λ = gamma = 1
    for i in (0, 2):
        both = np.concatenate(raw[i : i + 2])
        found = np.concatenate(made.advantages[i : i + 2])
        assert found == pytest.approx((both - both.mean()) / both.std(ddof=1), abs=1e-6)
    assert np.concatenate(made.targets) == pytest.approx([1, 1, 0, 0, 0, 2, 2, 0], abs=1e-12)


def test_advantages_of_turns_follow_the_chain(critic: Make):
    # t0 → t2, decay 0.9, λ 0.5; one value a turn, of what it was asked.
    asked = links([0.2, 0.0, 1.0, 0.5])
    asked[0] = Link("t0", "asker", 0.2, successor="t2", decay=0.9)
    critic_ = critic()
    made = critic_.estimate(asked, by_id(), False, Gae(lam=0.5))
    model, head = critic_.backbone.model, critic_.head
    v = [
        float(plain_values(model, head, one, who, True)[0].detach())
        for one, who in zip(SAID, WHO, strict=True)
    ]
    raw = [0.2 + 0.9 * v[2] - v[0] + 0.9 * 0.5 * (1.0 - v[2]), -v[1], 1.0 - v[2], 0.5 - v[3]]
    assert [float(x[0]) for x in made.old] == pytest.approx(v, abs=1e-12)
    assert [float(x[0]) for x in made.targets] == pytest.approx([a + b for a, b in zip(raw, v, strict=True)])
    spread = abs(raw[0] - raw[1]) / 2**0.5  # of two numbers, ddof 1: their whitened values are ±1/√2
    assert spread > 1e-3
    assert abs(float(made.advantages[0][0])) == pytest.approx(0.5**0.5, abs=1e-4)


def test_a_central_critic_reads_the_end_of_a_text_that_is_too_long(critic: Make):
    made = critic(central=True)
    long, short = " ".join(["red", "green"] * 200), "red green"
    asked = [Link("x", "asker", 1.0, text=long), Link("y", "teller", 0.0, text=short)]
    found = made.estimate(asked, {}, False, Gae())
    ids = made.tokenizer(long, add_special_tokens=False)["input_ids"]
    assert found.rows[0].prompt_ids == tuple(ids[-(made.context - 1) :])
    assert found.cut == 1
    assert made.update(Optimizer(), 0.2, 1, 0, 1)["cut_frac"] == 0.5


# -- steps ----------------------------------------------------------------------------------------


def test_two_minibatches_twice_agree_with_a_plain_loop_in_double_precision(critic: Make):
    optimizer = Optimizer(lr=3e-3, betas=(0.8, 0.9), weight_decay=0.1, max_grad_norm=0.5)
    made, minibatches = critic(optimizer=optimizer), (0, 0, 1, 1)
    model, head = copy.deepcopy(made.backbone.model), copy.deepcopy(made.head)
    estimate = made.estimate(links([1, 0, 2, 0], minibatches), by_id(), True, Gae(lam=0.5))
    old, targets = estimate.old, estimate.targets
    metrics = made.update(optimizer, 0.2, 2, 0, 1)

    weights = [*model.base_model.parameters(), *head.parameters()]
    plain = torch.optim.AdamW(weights, lr=3e-3, betas=(0.8, 0.9), weight_decay=0.1, eps=optimizer.eps)
    losses = []
    for mine in ([0, 1], [2, 3]) * 2:
        every = []
        for i in mine:
            values = plain_values(model, head, SAID[i], WHO[i])
            before, target = torch.from_numpy(old[i]), torch.from_numpy(targets[i])
            held = torch.minimum(torch.maximum(values, before - 0.2), before + 0.2)
            every.append(0.5 * torch.maximum((values - target) ** 2, (held - target) ** 2))
        losses.append(torch.cat(every).detach())
        plain.zero_grad()
        torch.cat(every).mean().backward()
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
        plain.step()
    assert metrics["optimizer_steps"] == 4
    assert metrics["value_loss"] == pytest.approx(float(torch.cat(losses).mean()), abs=1e-7)
    assert float(losses[2].mean()) != pytest.approx(float(losses[0].mean()), abs=1e-4)
    for mine_, theirs in zip(made.head.parameters(), head.parameters(), strict=True):
        assert torch.allclose(mine_, theirs, atol=1e-7)
    own = dict(made.backbone.model.base_model.named_parameters())
    for name, theirs in model.base_model.named_parameters():
        assert torch.allclose(own[name], theirs, atol=1e-7), name


def test_a_critic_learns_what_prompts_are_worth(critic: Make):
    made = critic(is_double=False, zero=True)
    rewards, seen = [1.0, 1.0, -1.0, 0.5], []
    for step in range(25):
        made.estimate(links(rewards), by_id(), False, Gae(lam=1.0))
        seen.append(made.update(Optimizer(lr=1e-2), None, 1, step, 25)["explained_variance"])
    assert seen[0] == pytest.approx(0.0, abs=1e-6)
    assert seen[-1] > 0.9


def test_frozen_embeddings_stay_and_the_rest_moves(critic: Make):
    made = critic(is_double=False, freeze=("embeddings",))
    before = {n: p.detach().clone() for n, p in made.backbone.model.base_model.named_parameters()}
    made.estimate(links([1, 0, 2, 0]), by_id(), True, Gae())
    made.update(Optimizer(lr=1e-2), 0.2, 1, 0, 1)
    same = {n for n, p in made.backbone.model.base_model.named_parameters() if torch.equal(p, before[n])}
    assert same == {"embed_tokens.weight"}


def test_a_value_that_is_not_finite_stops_the_run_and_names_turns(critic: Make):
    made = critic(is_double=False)
    made.estimate(links([float("nan"), 0, 0, 0]), by_id(), True, Gae())
    with pytest.raises(RunError, match=r"critic 'm', step 3: non-finite value loss; turns .*t0"):
        made.update(Optimizer(), 0.2, 1, 2, 9)


def test_nothing_is_learned_twice_from_one_estimate(critic: Make):
    made = critic(is_double=False)
    made.estimate(links([1, 0, 0, 0]), by_id(), True, Gae())
    made.update(Optimizer(), 0.2, 1, 0, 1)
    with pytest.raises(RunError, match="nothing to learn from"):
        made.update(Optimizer(), 0.2, 1, 1, 1)


# -- beside a model -------------------------------------------------------------------------------


@pytest.fixture
def critics(config_base: Callable[..., ConfigBase], tmp_path: Path) -> Callable[..., Critics]:
    """`critics(algorithm fields)`: those of model m; a critic of another model is in the plan, too."""

    def make(base: Any = None, central: bool = False, **fields: Any) -> Critics:
        own, base = base, config_base()
        mine, other = host(base), host(base, "other")
        specs = (
            spec_of(own or base, central=central),
            CriticIR("other", "other", ROLES, base, "hash", Optimizer()),
        )
        algorithm = Algorithm.model_validate({"use": "ppo", **fields})
        plan = Plan("flow", {}, models=(mine, other), algorithm=algorithm, critics=specs)
        return Critics(mine, plan, tmp_path, load_base(mine, tmp_path, seed=0) if own else None)

    return make


def test_a_model_holds_its_own_critics_alone(critics: Callable[..., Critics]):
    assert list(critics().by_name) == ["m"]


def test_a_turn_whose_tokens_cancel_out_still_teaches(critics: Callable[..., Critics]):
    # One reply of two tokens, λ 0: raw advantages are 0 and 1, whitened -1/√2 and 1/√2, their mean 0.
    made = critics(gae={"lam": 0.0})
    found = made.estimate({"m": [Link("t0", "asker", 1.0)]}, by_id())
    assert found == {"t0": pytest.approx(0.5**0.5, abs=1e-6)}
    assert made.token_advantages["t0"] == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-6)


def test_a_base_that_reads_other_tokens_or_fewer_is_refused(
    critics: Callable[..., Critics], config_base: Callable[..., ConfigBase], tmp_path: Path
):
    other = config_base("llama", max_position_embeddings=32)
    folder = tmp_path / "other"
    loaded = load_base(host(other, "narrow"), folder, seed=0)
    place = str(folder / "base" / "narrow")
    with pytest.raises(RunError, match="reads at most 32 tokens, and the model whose replies it values 128"):
        critics(base=place)
    (words,) = (Path(place) / "tokenizer.json",)
    words.write_text(words.read_text().replace('"red"', '"rod"'))
    with pytest.raises(RunError, match="has another tokenizer than the model whose replies it values"):
        critics(base=place)
    assert critics(base=place, central=True).by_name["m"].context == loaded.context == 32


def test_of_whole_turns_nothing_is_known_a_token(critics: Callable[..., Critics]):
    made = critics(use="turn_ppo")
    made.estimate({"m": links([1, 0, 2, 0])}, by_id())
    assert made.token_advantages == {}


def test_critics_begin_from_their_models_weights(critics: Callable[..., Critics]):
    made = critics().by_name["m"]
    weights = {n: torch.randn_like(p) for n, p in made.backbone.model.named_parameters()}
    made.start_from(weights)
    own = dict(made.backbone.model.named_parameters())
    assert all(torch.equal(own[name], weights[name]) for name in own)
    assert not made.head.weight.any()


def test_a_saved_critic_goes_on_bit_for_bit(critics: Callable[..., Critics], tmp_path: Path):
    first = critics()
    asked = {"m": links([1, 0, 2, 0], (0, 0, 1, 1))}
    first.estimate(asked, by_id())
    first.update(0, 9)
    first.save(tmp_path / "at")
    again = critics()
    again.load(tmp_path / "at")
    for made in (first, again):
        made.estimate(asked, by_id())
    assert first.update(1, 9) == again.update(1, 9)
    mine, theirs = first.by_name["m"].learner, again.by_name["m"].learner
    assert all(torch.equal(p, theirs.parameters[n]) for n, p in mine.parameters.items())


def test_a_checkpoint_that_lacks_a_part_of_a_critic_is_refused(
    critics: Callable[..., Critics], tmp_path: Path
):
    made = critics()
    made.estimate({"m": links([1, 0, 2, 0])}, by_id())
    made.update(0, 9)
    made.save(tmp_path / "at")
    folder = tmp_path / "at" / "critics"
    for name in ("m.optimizer.pt", "m.safetensors"):
        (folder / name).rename(folder / "away")
        with pytest.raises(RunError, match=f"{name} is missing"):
            critics().load(tmp_path / "at")
        (folder / "away").rename(folder / name)
    (folder / "critics.json").write_text('{"team": true}')
    with pytest.raises(RunError, match="holds the critics team, not m"):
        critics().load(tmp_path / "at")
    (folder / "critics.json").write_text('{"team')
    with pytest.raises(RunError, match=r"can't be read: .*critics\.json"):
        critics().load(tmp_path / "at")
