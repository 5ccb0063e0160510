"""What a run says or stops for when it looks as if nothing can be learned (silent failures made loud)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import fmean, pstdev

from masflow.runtime.training import Work

PROBE_FRAC = 0.9
ALARM_FRAC = 0.5


def truncation(work: Work) -> list[str]:
    """Warnings for roles whose replies run into their token budget.

    Before the first update this is the length probe: with nearly all replies cut nothing will be learned.
    """
    cut: dict[str, list[bool]] = defaultdict(list)
    for one in work.trajectories:
        for turn in one.turns:
            cut[turn.role].append(turn.outcome == "truncated")
    found = []
    for role, flags in sorted(cut.items()):
        frac = sum(flags) / len(flags)
        if work.step == 1 and frac >= PROBE_FRAC:
            found.append(
                f"length probe: {frac:.0%} of the replies of '{role}' are cut at its token budget before"
                f" training has begun; raise its reply.max_tokens, or teach it to stop (warm_start)"
            )
        elif frac >= ALARM_FRAC:
            found.append(
                f"more than half of the replies of '{role}' are cut at its token budget (reply.max_tokens)"
            )
    return found


def broken(work: Work) -> list[str]:
    """A warning for each way of ending that drops whole episodes of this step, with the first reason."""
    dropped: dict[str, list[str]] = defaultdict(list)
    for one in work.trajectories:
        if work.plan.graph.outcomes.get(one.outcome) == "drop_episode":
            dropped[one.outcome].append(one.detail)
    total = len(work.trajectories)
    return [
        f"{len(details)} of {total} episodes ended with {outcome} and train nothing: {details[0]}"
        for outcome, details in sorted(dropped.items())
    ]


def idle(work: Work, counts: dict[str, int]) -> str:
    """Count steps without anything to learn; the reason to stop once `train.patience` is reached, else "".

    Args:
        counts: `groups` and `role NAME` → consecutive idle steps; changed in place. Counted before selection.
    """
    assert work.batch is not None
    trained = {role for policy in work.team.trained() for role in policy.roles}
    spoken = {turn.member for rows in [work.trajectories] for one in rows for turn in one.turns}
    rows = {row.turn_id for rows in work.batch.rows.values() for row in rows}
    learnable = bool(work.batch.stats.get("learnable_group_frac", 0.0))
    trainable = work.batch.trainable_members
    seen = {"groups": learnable, **{f"role {role}": role in trainable for role in sorted(trained)}}
    for name, alive in seen.items():
        counts[name] = 0 if alive else counts.get(name, 0) + 1
    patience = work.plan.train.patience
    over = [name for name in seen if counts[name] >= patience]
    if not over:
        return ""
    counts.update(dict.fromkeys(over, 0))
    return _why(work, over, patience, spoken, len(rows))


def _ends(work: Work) -> str:
    """How the step's episodes and their turns ended, the commonest first, and one of the reasons."""
    failures = sorted({text for one in work.scored for text in one.failures})
    turns = [turn for one in work.trajectories for turn in one.turns]
    details = failures or sorted({one.detail or "" for one in (*work.trajectories, *turns)} - {""})
    ended = [f"episodes: {_counted(one.outcome for one in work.trajectories)}"]
    ended += [f"turns: {_counted(turn.outcome for turn in turns)}"] if turns else []
    return "; ".join(ended) + (f" ({details[0]})" if details else "")


def _counted(words: Iterable[str]) -> str:
    return ", ".join(f"{number} {word}" for word, number in Counter(words).most_common())


def _why(work: Work, over: list[str], patience: int, spoken: set[str], num_rows: int) -> str:
    if "groups" not in over:
        names = [name.removeprefix("role ") for name in over]
        silent = [name for name in names if name not in spoken]
        why = "never speaks" if silent else "has only turns without a reward, masked or dropped ones"
        role = (silent or names)[0]
        return f"for {patience} steps in a row the trainable role '{role}' had no trainable turn: it {why}"
    assert work.batch is not None
    totals = [t for one in work.scored for t in one.totals.values() if t is not None]
    if not work.batch.stats["trainable_turns"]:
        why = ("no turn can be trained on" if totals else "no turn has a reward") + f"; {_ends(work)}"
    elif pstdev(totals) == 0:
        why = f"every turn got the same reward, {fmean(totals):g}"
    else:
        why = (
            f"in every group all rewards are equal (mean {fmean(totals):g}); try more samples or easier tasks"
        )
    return f"for {patience} steps in a row no group was learnable: {why}"
