"""Rows that are drawn together: they join and leave at any time, and each is computed as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from masflow.models.backbone import Backbone
from masflow.models.decoding import Drawing, Job, Sampled, decode
from masflow.models.engine import SamplingParams
from masflow.models.speaking import ModuleSpeaker, Opening, Prefix

Make = Callable[..., Backbone]


def _alone(backbone: Backbone, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([backbone.model(torch.tensor([row])).logits[0, -1] for row in rows])


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_rows_that_join_and_leave_at_any_time_speak_as_if_alone(backbone: Make, family: str) -> None:
    # The reference is the whole model on each row, without a cache.
    model, rng = backbone(family), np.random.default_rng(0)
    speaker = ModuleSpeaker(model)
    rows: list[list[int]] = []
    kept: list[tuple[tuple[int, ...], Prefix]] = []
    for step in range(40):
        if step % 4 == 0:
            openings, new = _openings(rng, kept)
            with torch.no_grad():
                found = speaker.admit(openings)
            assert torch.allclose(found, _alone(model, new), atol=1e-4)
            rows += new
        token_B = torch.from_numpy(rng.integers(5, 140, size=len(rows)))
        with torch.no_grad():
            logits_BV = speaker.step(token_B)
        for row, token in zip(rows, token_B.tolist(), strict=True):
            row.append(token)
        assert torch.allclose(logits_BV, _alone(model, rows), atol=1e-4)
        gone = [row for row in rng.permutation(len(rows)).tolist() if rng.random() < 0.2]
        left = speaker.leave(gone, [True] * len(gone))
        kept += [(tuple(rows[r]), p) for r, p in zip(gone, left, strict=True) if p and len(rows[r]) < 90]
        kept = kept[-5:]
        rows = [row for number, row in enumerate(rows) if number not in gone]
        assert speaker.num_rows == len(rows)


def _openings(
    rng: np.random.Generator, kept: Sequence[tuple[tuple[int, ...], Prefix]]
) -> tuple[list[Opening], list[list[int]]]:
    openings: list[Opening] = []
    for _ in range(int(rng.integers(1, 5))):
        ids = tuple(rng.integers(5, 140, size=int(rng.choice([1, 3, 40, 70]))).tolist())
        prefix = None
        if kept and rng.random() < 0.5:
            before, prefix = kept[int(rng.integers(len(kept)))]
            ids = (*before, *ids[:8])
        openings.append(Opening(ids, None, prefix, int(rng.integers(1, 4))))
    return openings, [list(o.ids) for o in openings for _ in range(o.copies)]


def _draw(drawing: Drawing, jobs: Sequence[Job], every: int) -> list[Sampled]:
    """Jobs that come one after another, so many tokens apart."""
    done: dict[int, Sampled] = {}
    for job in jobs:
        drawing.add([job])
        for _ in range(every):
            done.update(drawing.advance())
    while not drawing.is_idle:
        done.update(drawing.advance())
    return [done[number] for number in range(len(jobs))]


def _jobs(count: int = 14) -> list[Job]:
    rng = np.random.default_rng(3)
    prompts = [
        tuple(rng.integers(5, 140, size=int(size)).tolist()) for size in rng.integers(2, 40, size=count)
    ]
    return [
        Job(
            prompt,
            SamplingParams(temperature=0.5 + n % 3, top_p=1.0 - 0.1 * (n % 2), max_tokens=1 + n % 9),
            n,
        )
        for n, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("budget", [None, 60])
def test_when_a_job_comes_changes_none_of_its_tokens(backbone: Make, budget: int | None) -> None:
    model, jobs = backbone("llama"), _jobs()
    wanted = [decode(model, [job], frozenset({9}))[0] for job in jobs]
    for every in (0, 1, 3):
        drawing = Drawing(ModuleSpeaker(model), model.device, frozenset({9}), budget)
        found = _draw(drawing, jobs, every)
        assert [(r.ids, r.finish) for r in found] == [(r.ids, r.finish) for r in wanted]
        assert all(np.allclose(a.logprobs, b.logprobs, atol=1e-5) for a, b in zip(found, wanted, strict=True))


def test_a_row_draws_from_its_own_stream_wherever_it_joins(backbone: Make) -> None:
    # Replies longer than a block of 64 uniforms, that begin at different places of their companions' blocks.
    model = backbone("llama")
    jobs = [Job((5, 6, 7 + n), SamplingParams(temperature=1.5, max_tokens=70), n) for n in range(3)]
    wanted = [decode(model, [job], frozenset())[0].ids for job in jobs]
    drawing = Drawing(ModuleSpeaker(model), model.device, frozenset())
    assert [r.ids for r in _draw(drawing, jobs, 20)] == wanted


def test_a_long_beginning_that_prompts_share_is_prefilled_once(
    backbone: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rng = backbone("qwen3"), np.random.default_rng(1)
    shared = tuple(rng.integers(5, 140, size=100).tolist())
    prompts = [(*shared, *rng.integers(5, 140, size=n).tolist()) for n in (3, 5, 9)] + [shared[:50]]
    jobs = [Job(p, SamplingParams(max_tokens=4), s) for s, p in enumerate(prompts)]
    wanted = [decode(model, [job], frozenset())[0].ids for job in jobs]
    seen: list[tuple[int, ...]] = []
    plain = model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda ids, *rest: seen.append(tuple(ids.shape)) or plain(ids, *rest)
    )
    assert [r.ids for r in decode(model, jobs, frozenset())] == wanted
    assert sum(rows * width for rows, width in seen if width > 1) <= 100 + 3 * 9 + 50
