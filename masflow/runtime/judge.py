"""Ask frozen roles for rewards: `use: role:NAME`.

The role's prompt sees the reward's args; the number in its reply is the score.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from masflow.compiler.expressions import TemplateProblem, render
from masflow.compiler.plan import Plan
from masflow.models.engine import Reply, Request
from masflow.rl.functions import Judge, Judgement, Verdict, number
from masflow.runtime.replies import parse_reply
from masflow.runtime.turns import policy_of, sampling
from masflow.trace import EpisodeKey, Message, Path, Step

__all__ = ["judge_of", "score_in"]

Generate = Callable[[Sequence[Request]], list[Reply]]
WORDS = {"yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


def judge_of(plan: Plan, generate: Generate) -> Judge:
    """A judge that asks the plan's models, greedily unless the role's `sampling.eval` says otherwise.

    A role with copies is a panel: the score is the mean over its members' verdicts.
    """

    def judge(questions: Sequence[Judgement]) -> list[Verdict]:
        panels: list[list[Request] | Verdict] = []
        seen: Counter[tuple[str, EpisodeKey, Path]] = Counter()
        for question in questions:
            place = (question.call + question.reward, question.key, question.path)
            seen[place] += 1
            try:
                panels.append([_request(plan, question, m, seen[place]) for m in _members(question)])
            except TemplateProblem as problem:
                panels.append(Verdict(None, f"prompt of judge {question.role.name}: {problem}"))
        requests = [request for panel in panels if isinstance(panel, list) for request in panel]
        replies = iter(generate(requests) if requests else [])
        return [
            panel
            if isinstance(panel, Verdict)
            else _mean([_verdict(plan, question, next(replies)) for _ in panel])
            for question, panel in zip(questions, panels, strict=True)
        ]

    return judge


def _members(question: Judgement) -> tuple[str, ...]:
    return question.role.members or (question.role.name,)


def _request(plan: Plan, question: Judgement, member: str, nth: int) -> Request:
    """Raises TemplateProblem."""
    role, names = question.role, {**question.args, "me": member}
    texts = (("system", role.system), ("user", role.prompt))
    messages = tuple(Message(who, render(text, names)) for who, text in texts if text)
    path = (*question.path, Step(question.call, f"judge {question.reward} {member}", nth))
    qualified = question.call + member
    key = replace(question.key, split=f"{question.key.split} judge")
    return Request(
        turn_id=key.turn_id(path),
        policy=policy_of(plan, qualified),
        messages=messages,
        sampling=sampling(plan, role, "eval"),
        seed=key.seed(path),
        node=question.call + role.name,
        role=question.call + role.name,
        member=qualified,
    )


def _verdict(plan: Plan, question: Judgement, reply: Reply) -> Verdict:
    name = question.role.name
    if reply.finish in ("prompt_too_long", "error"):
        return Verdict(None, f"judge {name}: {reply.detail or reply.finish}")
    stop = sampling(plan, question.role, "eval").stop
    parsed = parse_reply(question.role.reply, reply.text, stop=stop)
    if parsed.value is None:
        return Verdict(None, f"judge {name}: {parsed.reason}")
    found = score_in(parsed.value)
    if found is None:
        return Verdict(None, f"judge {name}: no score in {reply.text[:80]!r}; reply with a field 'score'")
    return Verdict(found)


def score_in(value: dict[str, Any]) -> float | None:
    """The score of a parsed reply: its field `score`, else its only field; a number, or yes or no."""
    raw = value.get("score", next(iter(value.values())) if len(value) == 1 else None)
    if isinstance(raw, str):
        word = raw.strip().lower()
        if word in WORDS:
            return WORDS[word]
        try:
            raw = float(word)
        except ValueError:
            return None
    return number(raw)


def _mean(panel: list[Verdict]) -> Verdict:
    scores = [v.score for v in panel if v.score is not None]
    return Verdict(fmean(scores)) if scores else panel[0]
