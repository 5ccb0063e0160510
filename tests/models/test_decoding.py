"""The decoding loop against `transformers.generate`, against exact distributions, and against itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from masflow.errors import RunError
from masflow.models.backbone import Backbone
from masflow.models.decoding import Job, decode
from masflow.models.engine import SamplingParams
from masflow.models.sampling import NotFinite, draw, filter_logits
from masflow.models.speaking import ModuleSpeaker

Make = Callable[..., Backbone]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def _prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(int(i) for i in rng.integers(5, 140, size=int(rng.integers(2, 14)))) for _ in range(count)]


def _by_generate(backbone: Backbone, prompt: tuple[int, ...], stop: int) -> list[int]:
    model = backbone.model
    model.generation_config.eos_token_id = stop
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2", "mistral"])
def test_greedy_equals_generate(backbone: Make, family: str) -> None:
    model = backbone(family)
    prompts = [*_prompts(6), _prompts(1)[0]]
    free = decode(model, [Job(p, GREEDY, 0) for p in prompts], frozenset())
    stop = free[2].ids[3]  # so that some rows end early, and the rest go on in a smaller batch
    ended = decode(model, [Job(p, GREEDY, 0) for p in prompts], frozenset({stop}))
    assert [r.ids for r in ended] == [_by_generate(model, p, stop) for p in prompts]
    assert ended[2].finish == "stop" and ended[2].ids[-1] == stop and len(ended[2].ids) <= 4
    assert {len(r.ids) for r in ended} != {12}


def test_equal_prompts_are_prefilled_once(backbone: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = backbone()
    seen: list[tuple[int, ...]] = []
    plain = model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda ids, *rest: seen.append(tuple(ids.shape)) or plain(ids, *rest)
    )
    two = _prompts(2)
    jobs = [Job(p, SamplingParams(max_tokens=3), s) for p in two for s in range(8)]
    decode(model, jobs, frozenset())
    assert seen == [(2, max(map(len, two))), (16, 1), (16, 1)]


def test_plain_attention_gives_the_same(backbone: Make) -> None:
    jobs = [Job(p, SamplingParams(max_tokens=6), i) for i, p in enumerate(_prompts(8))]
    fast, eager = (
        decode(backbone(), jobs, frozenset()),
        decode(backbone(attention="eager"), jobs, frozenset()),
    )
    assert [r.ids for r in fast] == [r.ids for r in eager]


def test_an_architecture_that_ignores_masks_is_refused() -> None:
    config = AutoConfig.for_model("bloom", vocab_size=50, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(RunError, match="models of type 'bloom'"):
        Backbone(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_company_changes_no_draw(backbone: Make, family: str) -> None:
    model = backbone(family)
    jobs = [
        Job(p, SamplingParams(temperature=0.7, max_tokens=8 + i % 3), 100 + i)
        for i, p in enumerate(_prompts(9) * 2)
    ]
    together = decode(model, jobs, frozenset({7, 30}))
    for job, reply in zip(jobs, together, strict=True):
        alone = decode(model, [job], frozenset({7, 30}))[0]
        assert alone.ids == reply.ids and alone.finish == reply.finish
        assert np.allclose(alone.logprobs, reply.logprobs, atol=1e-5)


def test_the_same_batch_repeats_bit_for_bit(backbone: Make) -> None:
    model = backbone()
    jobs = [Job(p, SamplingParams(max_tokens=10, top_p=0.9), i) for i, p in enumerate(_prompts(16))]
    first, second = decode(model, jobs, frozenset({9})), decode(model, jobs, frozenset({9}))
    assert first == second


def test_seeds_differ_and_each_row_has_its_own_limit(backbone: Make) -> None:
    prompt = _prompts(1)[0]
    jobs = [Job(prompt, SamplingParams(max_tokens=1 + i % 4), i) for i in range(40)]
    replies = decode(backbone(), jobs, frozenset())
    assert [len(r.ids) for r in replies] == [1 + i % 4 for i in range(40)]
    assert len({r.ids[0] for r in replies}) > 10


def test_replies_longer_than_a_block_of_uniforms_go_on(backbone: Make) -> None:
    jobs = [
        Job(p, SamplingParams(max_tokens=n, temperature=2.0), 5)
        for p, n in zip(_prompts(2), (70, 3), strict=True)
    ]
    replies = decode(backbone(), jobs, frozenset())
    assert [len(r.ids) for r in replies] == [70, 3]
    assert replies[0].ids == decode(backbone(), jobs[:1], frozenset())[0].ids


def test_logprobs_are_of_the_distribution_sampled_from(backbone: Make) -> None:
    model = backbone("llama")
    prompt = _prompts(1)[0]
    for params in (
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.6, temperature=1.5),
    ):
        reply = decode(
            model, [Job(prompt, SamplingParams(**{**params.__dict__, "max_tokens": 4}), 3)], frozenset()
        )[0]
        for place, (token, logprob) in enumerate(zip(reply.ids, reply.logprobs, strict=True)):
            with torch.no_grad():
                logits = model.model(torch.tensor([[*prompt, *reply.ids[:place]]])).logits[0, -1].double()
            assert logprob == pytest.approx(
                float(np.log(_allowed(logits / params.temperature, params)[token])), abs=1e-4
            )


def _allowed(logits_V: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The distribution by the definition, one token after another, in float64."""
    probs = torch.softmax(logits_V, -1).numpy()
    order = np.argsort(-probs, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    probs_kept = probs[order] / probs[order].sum()
    kept, mass = [], 0.0
    for token, p in zip(order, probs_kept, strict=True):
        if params.top_p < 1 and mass >= params.top_p:
            break
        kept.append(token)
        mass += p
    out = np.zeros_like(probs)
    out[kept] = probs[kept] / probs[kept].sum()
    return out


def test_frequencies_match_the_distribution() -> None:
    # 20,000 draws from five known weights: chi-square, 4 degrees of freedom, 99.9 % point 18.47.
    weights = np.array([0.5, 0.2, 0.2, 0.07, 0.03])
    logits = torch.tensor(np.log(weights), dtype=torch.float32).expand(20_000, -1)
    uniforms = torch.from_numpy(
        np.array([np.random.Generator(np.random.Philox(key=i)).random() for i in range(20_000)])
    )
    tokens, logprobs = draw(logits, uniforms)
    counts = np.bincount(tokens.numpy(), minlength=5)
    assert ((counts - 20_000 * weights) ** 2 / (20_000 * weights)).sum() < 18.47
    assert np.allclose(logprobs.numpy(), np.log(weights)[tokens.numpy()], atol=1e-5)


def test_every_uniform_gives_the_token_of_the_plain_cumulative_sum() -> None:
    # 200 vocabulary entries, so that slices of 64 end unevenly; the reference is one float64 cumulative sum.
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(1, 200, generator=generator).expand(3000, -1) * 3
    uniforms = torch.rand(3000, generator=generator, dtype=torch.float64)
    plain = torch.searchsorted(torch.softmax(logits[0].double(), -1).cumsum(0), uniforms, right=True)
    tokens, _ = draw(logits, uniforms)
    assert (tokens == plain).float().mean() > 0.999
    edges, _ = draw(logits[:2], torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert edges.tolist() == [0, 199]


def test_an_excluded_token_is_never_drawn() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]]).expand(500, -1)
    kept = filter_logits(logits, torch.full((500,), 2), torch.ones(500))
    uniforms = torch.linspace(0, 1 - 1e-12, 500, dtype=torch.float64)
    tokens, _ = draw(kept, uniforms)
    assert Counter(tokens.tolist()).keys() == {1, 2}


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_silent__nan_then_exclamation_marks_for_ever__nothing_is_drawn_from_broken_logits(odd: float) -> None:
    logits = torch.zeros(3, 70)
    logits[1, 69] = odd
    logits[2] = -torch.inf
    with pytest.raises(NotFinite) as found:
        draw(logits, torch.full((3,), 0.5, dtype=torch.float64))
    assert found.value.rows == [1, 2]


def test_the_largest_probability_always_stays() -> None:
    kept = filter_logits(torch.tensor([[0.0, 5.0]]), torch.tensor([0]), torch.tensor([1e-6]))
    assert torch.isinf(kept[0, 0]) and kept[0, 1] == 5.0


def test_a_budget_draws_the_same_replies_and_is_never_exceeded(
    backbone: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = backbone()
    jobs = [Job(p, SamplingParams(max_tokens=6), i) for i, p in enumerate(_prompts(12))]
    whole = decode(model, jobs, frozenset())
    most = 0
    step = ModuleSpeaker.step

    def watched(speaker: ModuleSpeaker, token_B: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, speaker.num_rows * (speaker._arena.longest + 1))
        return step(speaker, token_B)

    monkeypatch.setattr(ModuleSpeaker, "step", watched)
    parts = decode(model, jobs, frozenset(), max_tokens=60)
    assert [r.ids for r in parts] == [r.ids for r in whole]
    assert 30 < most <= 60
