"""The token loss against numbers worked out by hand and against gradients written out in float64."""

import math

import numpy as np
import pytest
import torch

from masflow.rl.losses import LossSpec, kl_penalty_BT, ratio_BT, row_means_N, token_loss_BT
from masflow.spec.experiment import Algorithm, Importance, Kl

OLD = math.log(0.5)


def loss(p, advantage, spec=LossSpec(), **more):  # noqa: B008
    """One token whose probability was 0.5 when it was sampled and is `p` now."""
    logprob = torch.tensor([[math.log(p)]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[OLD]], dtype=torch.float64)
    value, metrics = token_loss_BT(logprob, old, torch.tensor([advantage], dtype=torch.float64), spec, **more)
    value.sum().backward()
    return value.item(), logprob.grad.item(), metrics  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("p", "advantage", "value", "gradient", "clipped"),
    [
        (0.5, 2.0, -2.0, -2.0, 0),  # on-policy: r = 1
        (0.55, 1.0, -1.1, -1.1, 0),  # r = 1.1, inside
        (0.7, 1.0, -1.28, 0.0, 1),  # r = 1.4, good already: held at 1 + high
        (0.3, 1.0, -0.6, -0.6, 0),  # r = 0.6 but good: min takes the unclipped one
        (0.3, -1.0, 0.9, 0.0, 1),  # r = 0.6, bad already: held at 1 - low
        (0.7, -1.0, 1.4, 1.4, 0),  # r = 1.4 and bad: no clip, it must come down
        (0.7, 0.0, 0.0, 0.0, 0),
    ],
)
def test_the_clip_has_two_bounds_and_is_pessimistic(p, advantage, value, gradient, clipped):
    got, slope, metrics = loss(p, advantage, LossSpec(clip_low=0.1, clip_high=0.28))
    assert got == pytest.approx(value)
    assert slope == pytest.approx(gradient)
    assert metrics["clip_frac"].item() == clipped
    assert metrics["ratio"].item() == pytest.approx(p / 0.5)


@pytest.mark.parametrize(
    ("p", "advantage", "value", "gradient", "clipped"),
    [
        (0.9, -1.0, 1.8, 1.8, 0),  # r = 1.8: below c = 3 nothing changes
        (0.9, -2.0, 3.6, 3.6, 0),
        (0.1, -1.0, 0.8, 0.0, 1),  # r = 0.2: PPO's own clip
        (0.9, 1.0, -1.2, 0.0, 1),  # a good one is held by PPO's clip alone
    ],
)
def test_a_dual_clip_leaves_ratios_below_it_alone(p, advantage, value, gradient, clipped):
    got, slope, metrics = loss(p, advantage, LossSpec(dual_clip=3.0))
    assert (got, slope) == (pytest.approx(value), pytest.approx(gradient))
    assert metrics["clip_frac"].item() == clipped


def test_a_dual_clip_bounds_what_a_bad_token_can_cost():
    """Ye et al. 2019, eq. 5: max(min(r A, clip(r) A), c A), with r = 4, A = -2, c = 3: -6, not -8."""
    spec = LossSpec(dual_clip=3.0)
    logprob = torch.tensor([[math.log(4.0) - 3]], dtype=torch.float64, requires_grad=True)
    old, advantage = torch.tensor([[-3.0]], dtype=torch.float64), torch.tensor([-2.0], dtype=torch.float64)
    value, metrics = token_loss_BT(logprob, old, advantage, spec)
    value.sum().backward()
    assert value.item() == pytest.approx(6.0) and logprob.grad.item() == 0.0  # type: ignore[union-attr]
    assert metrics["clip_frac"].item() == 1
    assert token_loss_BT(logprob, old, advantage, LossSpec())[0].item() == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("p", "advantage", "weight", "clipped"),
    [
        (0.5, 2.0, 1.0, 0),
        (0.6, -1.0, 1.2, 0),
        (0.9, 1.0, 1.5, 1),  # r = 1.8, held at 1.5: the token keeps its gradient
        (0.1, -1.0, 0.4, 1),  # r = 0.2, held at 0.4
    ],
)
def test_cispos_ratio_is_a_bounded_constant_and_every_token_keeps_its_gradient(p, advantage, weight, clipped):
    """-sg(w) A log p, whose gradient by log p is -w A."""
    got, slope, metrics = loss(p, advantage, LossSpec(clip="cispo", clip_low=0.6, clip_high=0.5))
    assert got == pytest.approx(-weight * advantage * math.log(p))
    assert slope == pytest.approx(-weight * advantage)
    assert metrics["clip_frac"].item() == clipped


def test_without_a_clip_the_ratio_is_unbounded():
    got, slope, metrics = loss(0.9, 1.0, LossSpec(clip="none", clip_high=0.1))
    assert (got, slope) == (pytest.approx(-1.8), pytest.approx(-1.8)) and metrics["clip_frac"].item() == 0


def test_importance_weights_multiply_the_policys_loss_and_not_the_kl():
    """r = 1, A = 2, weight 0.5: -1; reference 0.25: k2 = ln(2)² / 2."""
    spec = LossSpec(kl_weight=0.1, kl_estimator="k2")
    reference = torch.tensor([[math.log(0.25)]], dtype=torch.float64)
    weight = torch.tensor([[0.5]], dtype=torch.float64)
    got, slope, _ = loss(0.5, 2.0, spec, reference_BT=reference, weight_BT=weight)
    assert got == pytest.approx(-1 + 0.1 * math.log(2) ** 2 / 2)
    assert slope == pytest.approx(-1 + 0.1 * math.log(2))


def test_the_ratio_of_a_turn_is_the_geometric_mean_of_its_tokens_ratios():
    """Ratios 2, 1/2, 4 and 3: turn 0 has the first three, (2 · 1/2 · 4)^(1/3); turn 1 the last."""
    ratios_N = torch.tensor([2.0, 0.5, 3.0, 4.0], dtype=torch.float64, requires_grad=True)
    row_N, lengths_B = torch.tensor([0, 0, 1, 0]), torch.tensor([3, 1])
    means_N = row_means_N(ratios_N.log(), row_N, lengths_B).exp()
    root = 4 ** (1 / 3)
    assert means_N.tolist() == pytest.approx([root, root, 3.0, root])
    means_N[0].backward()  # d/dr of (r r' r'')^(1/3) = root / (3 r)
    assert ratios_N.grad is not None
    assert ratios_N.grad.tolist() == pytest.approx([root / 6, root / 1.5, 0.0, root / 12])


def test_a_turns_ratio_is_clipped_as_a_whole():
    """Tokens' ratios 1.5 and 0.9: their root 1.162 is above 1.1, so that both lose their gradient; by
    themselves only the first would."""
    logprobs = torch.tensor([[math.log(0.75)], [math.log(0.45)]], dtype=torch.float64, requires_grad=True)
    old = torch.full((2, 1), OLD, dtype=torch.float64)
    one = torch.ones(2, dtype=torch.float64)
    spec = LossSpec(clip_high=0.1, ratio="sequence")
    means = row_means_N((logprobs - old)[:, 0], torch.tensor([0, 0]), torch.tensor([2]))[:, None]
    value, metrics = token_loss_BT(logprobs, old, one, spec, log_ratio_BT=means)
    value.sum().backward()
    assert value.flatten().tolist() == pytest.approx([-1.1, -1.1])
    assert metrics["ratio"].flatten().tolist() == pytest.approx([math.sqrt(1.35)] * 2)
    assert logprobs.grad is not None and logprobs.grad.flatten().tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # policy 0.5, reference 0.25: d = ln(0.25 / 0.5) = -ln 2
        ("k1", math.log(2), math.log(2)),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", 0.5 + math.log(2) - 1, 0.5),
    ],
)
def test_kl_estimators_have_their_values_and_gradients(estimator, value, gradient):
    logprob = torch.tensor([[math.log(0.5)]], dtype=torch.float64, requires_grad=True)
    penalty = kl_penalty_BT(logprob, torch.tensor([[math.log(0.25)]], dtype=torch.float64), estimator)
    penalty.sum().backward()
    assert penalty.item() == pytest.approx(value)
    assert logprob.grad.item() == pytest.approx(gradient)  # type: ignore[union-attr]


def expectation(estimator):
    """(expected value, expected gradient) over a softmax of three tokens, weighed by their chances."""
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    penalty = kl_penalty_BT(logprobs[None], reference[None], estimator)[0]
    chance = logprobs.exp().detach()
    (gradient,) = torch.autograd.grad((chance * penalty).sum(), logits)
    return (chance * penalty).sum().item(), gradient.numpy()


def kl_and_gradient(forward):
    p = np.exp([0.3, -0.4, 0.9]) / np.exp([0.3, -0.4, 0.9]).sum()
    q = np.exp([1.0, 0.2, -0.5]) / np.exp([1.0, 0.2, -0.5]).sum()
    kl = float((p * np.log(p / q)).sum())
    # d KL(p‖q) / d logit_i = p_i (ln(p_i / q_i) - KL);  d KL(q‖p) / d logit_i = p_i - q_i
    return kl, (p - q) if forward else p * (np.log(p / q) - kl)


@pytest.mark.parametrize(("estimator", "forward"), [("k1", False), ("k2", False), ("k3", True)])
def test_kl_gradients_are_on_average_those_that_the_docstring_names(estimator, forward):
    value, gradient = expectation(estimator)
    kl, expected = kl_and_gradient(forward)
    np.testing.assert_allclose(gradient, expected, rtol=1e-9)
    if estimator != "k2":
        assert value == pytest.approx(kl)


def test_kl_and_entropy_enter_with_their_weights():
    spec = LossSpec(kl_weight=0.1, kl_estimator="k3", entropy=0.01)
    reference = torch.tensor([[math.log(0.25)]], dtype=torch.float64)
    value, _, metrics = loss(0.5, 1.0, spec, reference_BT=reference, entropy_BT=torch.tensor([[2.0]]))
    assert value == pytest.approx(-1 + 0.1 * (math.log(2) - 0.5) - 0.01 * 2)
    assert metrics["kl_ref"].item() == pytest.approx(math.log(2) - 0.5)
    assert metrics["entropy"].item() == 2


def test_a_term_that_is_on_needs_its_input():
    with pytest.raises(ValueError, match="reference"):
        loss(0.5, 1.0, LossSpec(kl_weight=0.1))
    with pytest.raises(ValueError, match="entropies"):
        loss(0.5, 1.0, LossSpec(entropy=0.1))


@pytest.mark.parametrize("gap", [-1e4, -90.0, 90.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_far_apart_log_probs_stay_finite(gap, advantage):
    logprobs = torch.full((1, 1), gap, requires_grad=True)
    spec = LossSpec(kl_weight=1.0)
    value, metrics = token_loss_BT(
        logprobs, torch.zeros(1, 1), torch.tensor([advantage]), spec, torch.zeros(1, 1)
    )
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(logprobs.grad).all()  # type: ignore[arg-type]
    assert all(torch.isfinite(m).all() for m in metrics.values())
    assert torch.isfinite(ratio_BT(logprobs, torch.zeros(1, 1))).all()


def test_rows_and_tokens_match_a_float64_reference():
    rng = np.random.default_rng(0)
    new, old, ref = (np.log(rng.uniform(0.05, 1, (3, 5))) for _ in range(3))
    advantages = rng.normal(size=3)
    expected = np.zeros((3, 5))
    for b in range(3):
        for t in range(5):
            r, d = np.exp(new[b, t] - old[b, t]), ref[b, t] - new[b, t]
            clip = min(max(r, 0.8), 1.3)
            expected[b, t] = -min(r * advantages[b], clip * advantages[b]) + 0.05 * (np.exp(d) - d - 1)
    spec = LossSpec(clip_low=0.2, clip_high=0.3, kl_weight=0.05)
    args = [torch.tensor(x) for x in (new, old, advantages)]
    got, _ = token_loss_BT(args[0], args[1], args[2], spec, torch.tensor(ref))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


def test_the_loss_takes_its_knobs_from_the_algorithm():
    algorithm = Algorithm(clip_low=0.1, clip_high=0.28, entropy=0.02, kl=Kl(weight=0.3, estimator="k2"))
    assert LossSpec.from_algorithm(algorithm) == LossSpec(0.1, 0.28, 0.3, "k2", 0.02)
    algorithm = Algorithm(use="gspo", dual_clip=3, importance=Importance(cap=1.5), epochs=2)
    assert LossSpec.from_algorithm(algorithm) == LossSpec(
        3e-4, 4e-4, ratio="sequence", dual_clip=3.0, importance_cap=1.5, epochs=2
    )
    assert LossSpec.from_algorithm(Algorithm(use="cispo")) == LossSpec(1.0, 4.0, clip="cispo")
    assert LossSpec.from_algorithm(Algorithm(use="reinforce_pp")) == LossSpec(
        kl_weight=0.01, kl_estimator="k1", pays_kl=True
    )
