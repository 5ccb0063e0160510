"""What a turn's reward is changed by before it is compared: how near the reply came to its budget."""

from __future__ import annotations

from masflow.compiler.plan import Plan
from masflow.spec.experiment import Overlong
from masflow.trace import Turn

__all__ = ["budgets", "overlong"]


def overlong(spec: Overlong, turn: Turn, budget: int) -> float:
    """What a long reply costs (DAPO, arXiv 2503.14476, eq. 13): nothing up to budget - cache, then linearly
    more, up to `penalty` at the budget. The published cache is 4,096 of 20,480 tokens, a fifth.

    Args:
        budget: `max_tokens` of the role's reply.
    Returns:
        From 0 to `spec.penalty`. A truncated reply costs all of it, though a window may have cut it earlier.
    """
    cache = min(budget, spec.cache or max(1, budget // 5))
    if turn.outcome == "truncated":
        return spec.penalty
    over = turn.reply_tokens - (budget - cache)
    return spec.penalty * min(1.0, max(0.0, over / cache))


def budgets(plan: Plan) -> dict[str, int]:
    """Qualified role → `max_tokens` of its replies."""
    found: dict[str, int] = {}

    def walk(graph_key: str, call: str, seen: tuple[str, ...]) -> None:
        graph = plan.workflows[graph_key]
        for role in graph.roles:
            found[call + role.name] = role.reply.max_tokens
        for node in graph.nodes:
            if node.workflow and node.workflow not in seen:
                walk(node.workflow, f"{call}{node.name}/", (*seen, node.workflow))

    walk(plan.root, "", (plan.root,))
    return found
