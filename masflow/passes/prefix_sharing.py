"""`prefix_sharing`: in training, what rows of one model begin with goes through it once.

On unless it is switched off; it changes no gradient, and so no digest. Which tokens are shared is found out
from the rows themselves when they are there; here it is decided whether to look, and estimated what it saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from masflow.compiler.graph import Graph, Node, RoleIR
from masflow.compiler.plan import GroupIR, ModelIR, Plan, SharingIR
from masflow.compiler.sizes import window_of
from masflow.compiler.team import graphs_below
from masflow.spec.base import Spec

__all__ = ["PrefixSharing"]

CHARACTERS = 4
"""Of a token, in texts whose tokenizer isn't at hand."""


class PrefixSharing(Spec):
    """A prompt that a group's samples share, and the history that a conversation's turns share, are computed
    once in forward and backward passes, with the gradients that the rows have one by one.

        passes:
          - prefix_sharing: {enabled: false}
    """

    before: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()

    enabled: bool = True
    """False: every row is computed by itself."""

    def apply(self, plan: Plan) -> Plan:
        """Ensures: `plan.sharing` has an entry for each model that learns."""
        learners = [model for model in plan.models if model.train != "frozen" and model.endpoint is None]
        return replace(plan, sharing=tuple(self._decided(plan, model) for model in learners))

    def _decided(self, plan: Plan, model: ModelIR) -> SharingIR:
        plain, shared = _estimated(plan, set(model.roles))
        if not self.enabled:
            return SharingIR(model.name, False, "switched off", plain, plain)
        if shared >= plain:
            return SharingIR(model.name, True, "wherever rows turn out to begin alike", plain, plain)
        window = window_of(model)
        num = max(1, plan.sampler.samples)
        why = "what rows begin with is computed once"
        why += f"; of what a task puts into first prompts, {num - 1} of {num} tokens are saved"
        if window is not None:
            why += f"; rows of more than {window} tokens one by one, for layers look no further back"
        return SharingIR(model.name, True, why, plain, shared)


@dataclass(frozen=True)
class _Visits:
    """The turns of one node in one group of samples."""

    samples: int
    visits: int
    prompt: int
    """Tokens of the texts that are known: what a template puts in isn't."""
    reply: int
    opens: bool
    """Its first prompt hangs on the task alone, so that all samples have the same."""
    goes_on: bool
    """A conversation: each prompt continues the turn before."""

    @property
    def plain(self) -> int:
        rows = [self._row(visit) for visit in range(self.visits)]
        return self.samples * sum(rows)

    @property
    def shared(self) -> int:
        grown = self._row(self.visits - 1) if self.goes_on else self.plain // self.samples
        same = self.prompt if self.opens else 0
        return self.samples * (grown - same) + same

    def _row(self, visit: int) -> int:
        length = self.prompt + self.reply
        return length + visit * length if self.goes_on else length


def _estimated(plan: Plan, members: set[str]) -> tuple[int, int]:
    """(tokens of a task's rows one by one, those that are computed), at most, of fixed texts and budgets."""
    found = [_visits(plan, group) for group in plan.groups if _plays(plan, group, members)]
    return sum(v.plain for v in found), sum(v.shared for v in found)


def _plays(plan: Plan, group: GroupIR, members: set[str]) -> bool:
    names = {group.role, *(group.role.rpartition("/")[0] + m for m in _role(plan, group)[0].members)}
    return bool(names & members)


def _visits(plan: Plan, group: GroupIR) -> _Visits:
    role, node, graph = _role(plan, group)
    texts = (role.system, node.prompt or role.prompt)
    prompt = sum(len(part) for text in texts for part in _fixed(text)) // CHARACTERS
    is_loop = "[visit" in group.key[2] or ",visit" in group.key[2]
    visits = node.max_visits if is_loop else 1
    opens = plan.sampler.kind != "trajectories" or any(node.name in a.targets for a in graph.start)
    goes_on = role.conversation != "none"
    return _Visits(max(1, group.expected_size), visits, max(1, prompt), role.reply.max_tokens, opens, goes_on)


def _role(plan: Plan, group: GroupIR) -> tuple[RoleIR, Node, Graph]:
    for place in graphs_below(plan.root, plan.workflows):
        for node in place.graph.nodes:
            if place.prefix + node.name == group.node:
                for role in place.graph.roles:
                    if place.prefix + role.name == group.role:
                        return role, node, place.graph
    raise AssertionError(f"no node {group.node} of {group.role}")


def _fixed(text: str | None) -> Iterator[str]:
    """What a template says whatever is put into it."""
    for part in (text or "").split("{{"):
        yield part.rpartition("}}")[2]
