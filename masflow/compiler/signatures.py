"""Rules of arguments: what a node or a reward passes is what the function, tool or sub-workflow takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from masflow.compiler.graph import FunctionIR, Graph, Node, RewardIR, ToolIR
from masflow.compiler.usage import below
from masflow.errors import Problem, Where, unknown
from masflow.spec.types import mismatch

__all__ = ["signature_problems"]

GIVEN_TO_REWARDS = ("turn", "trajectory")


def signature_problems(graph: Graph, graphs: Mapping[str, Graph]) -> Iterator[Problem]:
    functions = {f.ref: f for f in graph.functions}
    tools = {tool.name: tool for tool in graph.tools}
    for node in () if graph.program else graph.nodes:  # a function's calls bring their arguments themselves
        if node.call is not None and node.call in functions:
            yield from _fits(functions[node.call], node.args, (), node.where)
        elif node.tool is not None and node.tool in tools:
            tool = tools[node.tool]
            free = (*tool.settings, *tool.bind, *(["state"] if tool.scope == "episode" else []))
            yield from _fits(tool.function, node.args, free, node.where)
            for name in node.args.keys() & tool.bind.keys():
                message = f"tool '{tool.name}' binds '{name}' itself"
                fix = f"remove '{name}' here, or from the tool's 'bind'"
                yield Problem.at(below(node.where, f"args.{name}"), "bound-argument", message, fix)
        elif node.workflow is not None and node.workflow in graphs:
            yield from _sub_workflow(node, graphs[node.workflow])
    for tool in graph.tools:
        yield from _bindings(tool)
    for reward in graph.rewards:
        yield from _reward(reward)


def _bindings(tool: ToolIR) -> Iterator[Problem]:
    """What is bound is a parameter, and isn't a setting, too."""
    function = tool.function
    if ":" in function.ref and not function.hash:
        return
    for name in tool.bind:
        where = below(tool.where, f"bind.{name}")
        if name in tool.settings or name == "state":
            message = (
                f"'{name}' is {'a setting' if name in tool.settings else 'the state'} of the tool already"
            )
            yield Problem.at(where, "bound-argument", message, f"remove '{name}' from 'bind'")
        elif name not in function.params and "**" not in function.params:
            known = [p for p in function.params if p not in tool.settings and p != "state"]
            yield unknown(where, "argument", name, known)


def _fits(
    function: FunctionIR, args: Iterable[str], free: tuple[str, ...], where: Where, key: str = "args"
) -> Iterator[Problem]:
    """Args: free: parameters that masflow fills in itself."""
    if ":" in function.ref and not function.hash:
        return  # it could not be read; that is a problem of its own
    args = tuple(args)
    name = function.ref.rsplit("/", 1)[-1]
    for arg in args:
        if arg not in function.params and "**" not in function.params:
            found = unknown(
                below(where, f"{key}.{arg}"), "argument", arg, [p for p in function.params if p not in free]
            )
            yield Problem(
                found.file, found.line, found.path, found.code, f"{found.message} ({name})", found.fix
            )
    missing = [p for p in function.required if p not in args and p not in free]
    if missing:
        message = f"{name} also needs {', '.join(map(repr, missing))}"
        yield Problem.at(below(where, key), "missing-argument", message, f"add '{missing[0]}: …' to {key}")


def _reward(reward: RewardIR) -> Iterator[Problem]:
    if reward.function is None:
        if reward.judge is None and (reward.args or reward.measure_after):
            key = "measure" if reward.measure_after else "args"
            message = f"well_formed takes no arguments, so '{key}' has no effect"
            yield Problem.at(below(reward.where, key), "useless-key", message, f"remove '{key}'")
        return
    if reward.measure_after:
        yield from _fits(reward.function, reward.measure_args, GIVEN_TO_REWARDS, reward.where, "measure.args")
    else:
        yield from _fits(reward.function, reward.args, GIVEN_TO_REWARDS, reward.where)
    if "turn" in reward.function.required and reward.level != "turn":
        name = reward.function.ref.rsplit("/", 1)[-1]
        message = f"{name} asks for 'turn', and the reward is of level {reward.level}"
        yield Problem.at(below(reward.where, "use"), "no-turn", message, "add 'level: turn'")


def _sub_workflow(node: Node, child: Graph) -> Iterator[Problem]:
    fields = {f.name: f for f in child.task}
    for name, value in node.args.items():
        if name not in fields:
            yield unknown(below(node.where, f"args.{name}"), "argument", name, fields)
        elif "{{" not in str(value):
            wrong = mismatch(value, fields[name].type, name)
            if wrong:
                yield Problem.at(
                    below(node.where, f"args.{name}"), "wrong-argument-type", wrong, "correct the value"
                )
    missing = [n for n, f in fields.items() if n not in node.args and not f.type.nullable]
    if missing:
        message = f"workflow '{child.name}' needs {', '.join(map(repr, missing))}"
        yield Problem.at(
            below(node.where, "args"), "missing-argument", message, f"add '{missing[0]}: …' to args"
        )
