"""From jobs to rows: equal prompts begin once, and so do beginnings that prompts share, or that are cached.

Knows no sampling. A shared beginning is prefilled alone, and the prompts go on from its keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from masflow.models.speaking import Opening, Prefix, Speaker

__all__ = ["Asked", "Finder", "open_rows"]

_STEM = 64
"""Tokens from which on a shared beginning may be worth a forward pass of its own."""


class Asked(Protocol):
    """What is to be begun: `decoding.Job`."""

    @property
    def prompt_ids(self) -> tuple[int, ...]: ...
    @property
    def adapter(self) -> str | None: ...
    @property
    def policy(self) -> str: ...


class Finder(Protocol):
    """A prefix cache: `prefixes.PrefixCache`."""

    def find(self, policy: str, ids: tuple[int, ...]) -> Prefix | None:
        """Of the longest known beginning of `ids` that is shorter than they are."""
        ...


def open_rows(
    speaker: Speaker, jobs: Sequence[Asked], cache: Finder | None = None
) -> tuple[list[int], Tensor, int]:
    """Let jobs join, behind the rows that are there.

    Returns:
        Numbers of the jobs in the order of their rows; (n, V) logits of their first tokens; how many prompt
        tokens were at hand in the cache, each distinct prompt once.
    """
    rows_of: dict[tuple[str | None, tuple[int, ...]], list[int]] = {}
    for number, job in enumerate(jobs):
        rows_of.setdefault((job.adapter, job.prompt_ids), []).append(number)
    openings = []
    cached = 0
    for (adapter, ids), rows in rows_of.items():
        prefix = cache.find(jobs[rows[0]].policy, ids) if cache is not None else None
        cached += prefix.length if prefix else 0
        openings.append(Opening(ids, adapter, prefix, len(rows)))
    openings = _with_stems(speaker, openings)
    return [number for rows in rows_of.values() for number in rows], speaker.admit(openings), cached


def _with_stems(speaker: Speaker, openings: list[Opening]) -> list[Opening]:
    """The openings, those that share a long beginning with its keys and values at hand."""
    out = list(openings)
    for run, length in _runs(openings):
        first = openings[run[0]]
        place = speaker.num_rows
        speaker.admit([Opening(first.ids[:length], first.adapter)])
        stem = speaker.leave([place], [True])[0]
        for u in run:
            out[u] = replace(openings[u], prefix=stem)
    return out


def _runs(openings: Sequence[Opening]) -> list[tuple[list[int], int]]:
    """(numbers of openings, the tokens that all of them begin with), where going through these once saves
    more than a pass of its own costs; openings with a prefix at hand stay out."""
    fresh = [u for u, opening in enumerate(openings) if opening.prefix is None and len(opening.ids) > _STEM]
    order = sorted(fresh, key=lambda u: (openings[u].adapter or "", openings[u].ids))
    found: list[tuple[list[int], int]] = []
    run: list[int] = []
    shared = 0
    for u in order:
        common = _common(openings[run[-1]], openings[u]) if run else 0
        if common >= _STEM and 2 * common >= shared:
            shared = min(shared, common) if shared else common
            run.append(u)
            continue
        found.append((run, shared))
        run, shared = [u], 0
    found.append((run, shared))
    return [(run, length) for run, length in found if (len(run) - 1) * length >= 3 * _STEM]


def _common(one: Opening, other: Opening) -> int:
    """Length of the beginning that two prompts of one adapter share; shorter than either."""
    if one.adapter != other.adapter or one.ids[:_STEM] != other.ids[:_STEM]:
        return 0
    bound = min(len(one.ids), len(other.ids)) - 1
    low, high = _STEM if bound >= _STEM else 0, bound
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.ids[:middle] == other.ids[:middle] else (low, middle - 1)
    return low
