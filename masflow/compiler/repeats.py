"""Warns of what keeps a workflow's function from doing the same again: clocks, chance, sets, effects.

Looks at the text of the function only, not at what it calls. Source of the rule: forks, resumed runs and
workers replay a function, so that it may hang on nothing but its task, its replies, `ctx.rng` and `ctx.tool`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["unrepeatable"]

CLOCK = "reads a clock, so a replay differs", "hand the time in with the task, or take it from a tool"
CHANCE = "takes chance from elsewhere, so a replay differs", "take it from ctx.rng"
EFFECT = "reaches outside, so a replay may differ", "make it a tool and write await ctx.tool(…)"
PLACE = "differs from process to process", "use a key or a number of your own"
AWAITS = "needs asyncio's loop, which a workflow doesn't run in", "await agents, ctx.tool and ctx.run only"
TASKS = AWAITS[0], "write ctx.spawn(…) and await what it gives"
GATHER = AWAITS[0], "write masflow.gather(…)"
ORDER = "goes through a set, whose order differs from process to process", "write sorted(…)"

EXACT = {
    "asyncio.gather": GATHER,
    "asyncio.create_task": TASKS,
    "asyncio.ensure_future": TASKS,
    "asyncio.TaskGroup": TASKS,
    "os.urandom": CHANCE,
    "uuid.uuid1": CHANCE,
    "uuid.uuid4": CHANCE,
    "datetime.date.today": CLOCK,
    "datetime.datetime.now": CLOCK,
    "datetime.datetime.today": CLOCK,
    "datetime.datetime.utcnow": CLOCK,
    "time.sleep": EFFECT,
    "id": PLACE,
    "hash": PLACE,
    "open": EFFECT,
    "input": EFFECT,
}
MODULES = {
    "random": CHANCE,
    "secrets": CHANCE,
    "numpy.random": CHANCE,
    "time": CLOCK,
    "asyncio": AWAITS,
    "subprocess": EFFECT,
    "requests": EFFECT,
    "httpx": EFFECT,
    "urllib.request": EFFECT,
    "socket": EFFECT,
}
IN_ORDER = ("list", "tuple", "enumerate", "iter")
"""Built-ins that keep the order of what they are given."""


def unrepeatable(tree: ast.Module, function: ast.AsyncFunctionDef) -> Iterator[tuple[int, str, str]]:
    """(line, what is wrong, the fix) of each place in the function."""
    names = _imported(tree)
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            called = _dotted(node.func, names)
            module = next((m for m in MODULES if called.startswith(f"{m}.")), "")
            told = EXACT.get(called) or MODULES.get(module)
            if told is not None:
                yield node.lineno, f"'{called}' {told[0]}", told[1]
            if called in IN_ORDER or called.endswith(".join"):
                yield from _set_order(node.args[:1])
        elif isinstance(node, (ast.For, ast.comprehension)):
            yield from _set_order([node.iter])


def _set_order(nodes: list[ast.expr]) -> Iterator[tuple[int, str, str]]:
    for node in nodes:
        made = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if isinstance(node, (ast.Set, ast.SetComp)) or (
            made and node.func.id in ("set", "frozenset")  # type: ignore[union-attr]
        ):
            yield node.lineno, ORDER[0], ORDER[1]


def _imported(tree: ast.Module) -> dict[str, str]:
    """Name in the file → the dotted name of what was imported under it."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else (alias.name.split(".")[0])
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """`np.random.rand` as `numpy.random.rand`; the bare name of a built-in; "" for what is neither."""
    rest: list[str] = []
    while isinstance(node, ast.Attribute):
        rest.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Constant) and rest:  # "".join
        return ".".join(["", *rest])
    if not isinstance(node, ast.Name):
        return ""
    if node.id not in names:
        return node.id if not rest else ""
    return ".".join([names[node.id], *rest])
