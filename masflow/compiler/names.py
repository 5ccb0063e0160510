"""Checks every text of a graph: its names exist and are known by then, null is guarded, types make sense.

Where a text was read from a file, its problems stand in that file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from masflow.compiler.analysis import analyse, analyse_condition, facts_of
from masflow.compiler.documents import Doc
from masflow.compiler.findings import Finding, Found, Scope, article
from masflow.compiler.graph import END, START, Arrow, Graph, Node, RewardIR, RoleIR
from masflow.compiler.guards import VISITED_BEFORE, Facts
from masflow.compiler.inference import INT, STR, UNKNOWN, declared, fits, list_of, non_null
from masflow.compiler.regions import Regions
from masflow.compiler.scopes import (
    AnyScope,
    BindScope,
    CallScope,
    ClosedScope,
    EndScope,
    GraphNames,
    NodeScope,
    raw_type,
)
from masflow.compiler.team import speakers_of
from masflow.errors import Problem, Where
from masflow.project import display_path
from masflow.spec.types import Type

__all__ = ["check_names", "check_program_names"]

Place = tuple[str | int, ...]
"""Keys that lead to a value in the document."""


def check_names(
    graph: Graph, graphs: Mapping[str, Graph], regions: Regions, doc: Doc | None = None
) -> list[Problem]:
    """Every rule of the language about names, expressions and what may be null, for one graph.

    Args:
        regions: of the graph, whose flow is sound.
        doc: the document that the graph was lowered from; gives problems their lines.
    """
    checker = _Checker(graph, graphs, GraphNames(graph, graphs, regions), doc)
    checker.clashes()
    for node in graph.nodes:
        _NodeCheck(checker, node).run()
    checker.arrows(START, graph.start, None)
    for name, raw in graph.output.items():
        checker.value(raw, NodeScope(checker.names, END), ("output", name))
    checker.bindings()
    for i, reward in enumerate(graph.rewards):
        checker.reward(reward, i)
    return list(dict.fromkeys(checker.problems))


def check_program_names(graph: Graph, graphs: Mapping[str, Graph], doc: Doc | None = None) -> list[Problem]:
    """The texts of a workflow that is a function: syntax, types, hidden fields; names as far as known.

    A prompt may name what only a call hands over, so that no name of it is unknown here.
    """
    checker = _Checker(graph, graphs, GraphNames(graph, graphs), doc)
    checker.clashes()
    for role in graph.roles:
        spec = doc.spec.roles.get(role.name) if doc is not None else None
        for key, text in (
            ("system", role.system),
            ("prompt", role.prompt),
            ("next_prompt", role.next_prompt),
        ):
            written = getattr(spec, key, None)
            checker.prompt(text, CallScope(checker.names), ("roles", role.name, key), written, frozenset())
        if role.reply.format == "choice" and isinstance(role.reply.choice, str):
            place = ("roles", role.name, "reply", "choice")
            checker.expression(role.reply.choice, CallScope(checker.names), place)
    checker.bindings()
    at_end = EndScope(checker.names, {"result": Found(UNKNOWN)})
    for name, raw in graph.output.items():
        checker.value(raw, at_end, ("output", name))
    for i, reward in enumerate(graph.rewards):
        own = {"output": Found(UNKNOWN)}
        if reward.level == "turn":
            kinds = {"visit": INT, "me": STR, "item": UNKNOWN, "key": UNKNOWN, "result": UNKNOWN}
            own = {name: Found(kind) for name, kind in kinds.items()}
        checker.reward(reward, i, EndScope(checker.names, own))
    return list(dict.fromkeys(checker.problems))


@dataclass
class _Checker:
    """Gathers the problems of one graph; the methods check one text each."""

    graph: Graph
    graphs: Mapping[str, Graph]
    names: GraphNames
    doc: Doc | None
    problems: list[Problem] = field(default_factory=list)

    def where(self, *place: str | int) -> Where:
        if self.doc is not None:
            return self.doc.where(*place)
        if place[:1] == ("nodes",) and place[1] in self.names.nodes:
            return replace(self.names.nodes[str(place[1])].where, path=".".join(map(str, place)))
        return Where(self.graph.where.file, self.graph.where.line, ".".join(map(str, place)))

    def problem(self, where: Where, code: str, message: str, fix: str) -> None:
        self.problems.append(Problem.at(where, code, message, fix))

    def report(self, finding: Finding, text: str, place: Place, where: Where | None = None) -> Finding:
        for issue in finding.issues:
            at = where or self.where(*place)
            if "\n" in text.strip() and at.line:
                at = replace(at, line=at.line + issue.line)
            self.problem(at, issue.code, issue.message, issue.fix)
        return finding

    def condition(
        self, text: str, scope: Scope, place: Place, where: Where | None = None, lenient: bool = False
    ) -> None:
        self.report(analyse_condition(text, scope, lenient=lenient), text, place, where)

    def expression(self, text: str, scope: Scope, place: Place, facts: Facts = frozenset()) -> Finding:
        return self.report(analyse(text, "expression", scope, facts), text, place)

    def value(
        self, raw: Any, scope: Scope, place: Place, facts: Facts = frozenset(), lenient: bool = False
    ) -> Finding:
        """A value with templates anywhere in it; what is found of the value itself."""
        if isinstance(raw, str) and "{" in raw:
            return self.report(analyse(raw, "value", scope, facts, lenient), raw, place)
        if isinstance(raw, Mapping):
            for key, item in raw.items():
                self.value(item, scope, (*place, str(key)), facts, lenient)
        elif isinstance(raw, (list, tuple)):
            for i, item in enumerate(raw):
                self.value(item, scope, (*place, i), facts, lenient)
        return Finding(raw_type(raw, scope))

    def prompt(self, text: str | None, scope: Scope, place: Place, written: str | None, facts: Facts) -> None:
        """A prompt; `written` is what stands in the document: the text, or a file's name."""
        if not text:
            return
        finding = analyse(text, "template", scope, facts)
        if not finding.issues:
            return
        file = self.doc.text(written, [], *place)[1] if self.doc is not None and written else ""
        if not file:
            self.report(finding, text, place)
            return
        path = self.where(*place).path
        for issue in finding.issues:
            where = Where(display_path(Path(file)), issue.line, path)
            self.problem(where, issue.code, issue.message, issue.fix)

    def bindings(self) -> None:
        """What tools bind: the task, hidden fields too, and params; a value of the parameter's type."""
        scope = BindScope(self.names)
        for tool in self.graph.tools:
            for name, raw in tool.bind.items():
                place = ("tools", tool.name, "bind", name)
                finding, wanted = self.value(raw, scope, place), tool.function.types.get(name)
                found = finding.type
                if finding.issues or wanted is None or wanted.kind == "any":
                    continue
                if not fits(found, wanted) or (found.nullable and name not in tool.function.nullable):
                    message = f"'{name}' is bound to {article(found)} ({found}); the tool takes {wanted}"
                    fix = "bind a value of that type"
                    self.problem(self.where(*place), "wrong-argument-type", message, fix)

    def clashes(self) -> None:
        """A task field, a node and an `as` name are bare names; no two may be the same."""
        for name in self.names.task:
            if name in self.names.nodes:
                message = f"'{name}' is a task field and a node; both are bare names"
                fix = f"rename the node, or the field: '{name}_given: {{type: …, from: {name}}}'"
                self.problem(self.where("nodes", name), "name-clash", message, fix)
        for node in self.graph.nodes:
            other = "a task field" if node.as_name in self.names.task else "a node"
            if node.as_name in self.names.task or node.as_name in self.names.nodes:
                message = f"'as: {node.as_name}' hides {other} of that name"
                self.problem(
                    self.where("nodes", node.name, "as"), "name-clash", message, "choose another name"
                )

    def arrows(self, name: str, arrows: tuple[Arrow, ...], node: Node | None) -> None:
        own = {} if node is None else {"visit": Found(INT)}
        scope = NodeScope(self.names, name, after=node is not None, own=own)
        for arrow in arrows:
            if arrow.when is not None:
                self.condition(arrow.when, scope, (), arrow.where)
        if node is not None and node.switch is not None:
            where = next((a.where for a in arrows if a.case is not None), node.where)
            finding = analyse(node.switch, "expression", scope, lenient=True)  # null ends as malformed
            found = self.report(finding, node.switch, (), where).type
            if found.kind in ("list", "record", "float"):
                message = f"the switch on '{node.switch}' is over {article(found)}; it needs a choice"
                self.problem(where, "switch-type", message, "switch over a field of type [word, word]")

    def reward(self, reward: RewardIR, i: int, scope: Scope | None = None) -> None:
        scope = scope or self._reward_scope(reward)
        if reward.when is not None:
            self.condition(reward.when, scope, ("rewards", i, "when"), lenient=True)
        self.value(reward.args, scope, ("rewards", i, "args"), lenient=True)
        self.value(reward.measure_args, scope, ("rewards", i, "measure", "args"), lenient=True)

        if reward.judge is not None:
            self._judge(reward, scope)

    def _judge(self, reward: RewardIR, scope: Scope) -> None:
        """A judge's prompts see the reward's arguments, none of them null, and nothing else."""
        role = next((role for role in self.graph.roles if role.name == reward.judge), None)
        if role is None:
            return
        own = {name: Found(non_null(raw_type(raw, scope))) for name, raw in reward.args.items()}
        seen = ClosedScope({**own, "me": Found(STR)}, f"an argument of reward '{reward.name}'")
        spec = self.doc.spec.roles.get(role.name) if self.doc is not None else None
        for key, text in (("system", role.system), ("prompt", role.prompt)):
            self.prompt(text, seen, ("roles", role.name, key), getattr(spec, key, None), frozenset())

    def _reward_scope(self, reward: RewardIR) -> Scope:
        """What a reward's templates see: the end, or the visits of the nodes that it looks at."""
        at_end = NodeScope(self.names, END, shows_hidden=True)
        if reward.level != "turn":
            return at_end
        speaking = {n.name for n in self.graph.nodes if self._may_be_paid(n, reward)}
        places = [
            n for n in (reward.measure_after or reward.nodes or sorted(speaking)) if n in self.names.nodes
        ]
        scopes = []
        for place in places:
            own = {name: Found(UNKNOWN) for name in self._locals(self.names.nodes[place])}
            own |= {"visit": Found(INT), "me": Found(STR), "result": Found(self.names.value_of(place).item)}
            scopes.append(NodeScope(self.names, place, after=True, shows_hidden=True, own=own))
        return AnyScope(tuple(scopes)) if scopes else at_end

    def _may_be_paid(self, node: Node, reward: RewardIR) -> bool:
        roles = {role.name: role for role in self.graph.roles}
        names = {m for name in speakers_of(node) if name in roles for m in (name, *roles[name].members)}
        return bool(names) and (not reward.roles or bool(names & set(reward.roles)))

    def _locals(self, node: Node) -> tuple[str, ...]:
        if node.foreach is not None:
            return ("item", "index", "others", *((node.as_name,) if node.as_name else ()))
        return ("index", "others") if self.names.value_of(node.name).is_list else ()


class _NodeCheck:
    """The texts of one node, in the order in which they are evaluated."""

    def __init__(self, checker: _Checker, node: Node):
        self.check = checker
        self.node = node
        self.names = checker.names
        self.value = checker.names.value_of(node.name)
        self.facts: Facts = facts_of(node.when) if node.when is not None else frozenset()
        self.visit = {"visit": Found(INT)}

    def at(self, *place: str | int) -> Place:
        return ("nodes", self.node.name, *place)

    def scope(self, own: Mapping[str, Found], **how: Any) -> NodeScope:
        return NodeScope(self.names, self.node.name, own={**self.visit, **own}, **how)

    def run(self) -> None:
        node, check = self.node, self.check
        before = self.scope({})
        if node.when is not None:
            check.condition(node.when, before, self.at("when"))
        item = self._foreach(before)
        own = self._own(item)
        unnamed = {name: found for name, found in own.items() if name != "me" or node.foreach is None}
        if node.key is not None:
            check.expression(
                node.key, self.scope({k: v for k, v in own.items() if k != "me"}), self.at("key")
            )
        if node.role is not None and "{{" in node.role:
            check.value(node.role, self.scope(unnamed), self.at("role"), self.facts)
        self._speaker(unnamed)
        self._arguments(own)
        if node.kind in ("role", "human"):
            self._prompts(own)
        self._writes(own)
        check.arrows(node.name, node.arrows, node)

    def _foreach(self, scope: NodeScope) -> Type:
        """Type of one item."""
        node = self.node
        if node.foreach is None:
            return UNKNOWN
        place = self.at("foreach")
        finding = self.check.expression(node.foreach, scope, place, self.facts)
        found, where = finding.type, self.check.where(*place)
        if found.kind in ("str", "choice", "int", "float", "bool", "record"):
            message = f"'foreach: {node.foreach}' is {article(found)}; it needs a list"
            self.check.problem(where, "not-a-list", message, "name a list")
        elif found.nullable:
            because = f": {finding.note}" if finding.note else ""
            message = f"'foreach: {node.foreach}' may be null{because}"
            self.check.problem(where, "null-used", message, f"write '{node.foreach} or []'")
        return found.item or UNKNOWN if found.kind == "list" else UNKNOWN

    def _own(self, item: Type) -> dict[str, Found]:
        """Names of one item or copy."""
        node = self.node
        others = Found(list_of(non_null(self.value.item)))
        if node.foreach is not None:
            named = {node.as_name: Found(item)} if node.as_name else {}
            key = Found(UNKNOWN if node.key else INT)
            return {"item": Found(item), **named, "index": Found(INT), "me": key, "others": others}
        if self.value.is_list:
            return {"index": Found(INT), "me": Found(STR), "others": others}
        return {}

    def _speaker(self, own: Mapping[str, Found]) -> None:
        node = self.node
        if node.speaker is None:
            return
        place = self.at("speaker")
        finding = self.check.expression(node.speaker, self.scope(own), place, self.facts)
        found, where = finding.type, self.check.where(*place)
        if found.kind not in ("str", "choice", "any", "null"):
            message = f"'speaker: {node.speaker}' is {article(found)}; it needs a member's name"
            self.check.problem(where, "speaker-type", message, "give one name, e.g. 'params.team[0]'")
        elif found.nullable:
            because = f": {finding.note}" if finding.note else ""
            fix = f"write '{node.speaker} or …'"
            self.check.problem(where, "null-used", f"'speaker: {node.speaker}' may be null{because}", fix)
        members = [m for role in self._roles() for m in role.members]
        strange = [word for word in found.choices if word not in members]
        if found.kind == "choice" and members and strange:
            message = (
                f"'{strange[0]}' may be chosen to speak, and is no member; members: {', '.join(members)}"
            )
            self.check.problem(where, "unknown-member", message, "let choice and members agree")

    def _roles(self) -> list[RoleIR]:
        names = set(speakers_of(self.node))
        return [role for role in self.check.graph.roles if role.name in names]

    def _arguments(self, own: Mapping[str, Found]) -> None:
        """Tools, calls and sub-workflows get hidden fields; null only where the parameter may be null."""
        node = self.node
        scope = self.scope(own, shows_hidden=True)
        for name, raw in node.args.items():
            place = self.at("args", name)
            child = self.check.graphs.get(node.workflow or "")
            entry = next((f for f in child.task if f.name == name), None) if child is not None else None
            seen = replace(scope, shows_hidden=entry is None or entry.hidden)
            finding = self.check.value(raw, seen, place, self.facts)
            wanted = self._parameter(name)
            if wanted is None or finding.issues:
                continue
            where, found = self.check.where(*place), finding.type
            if found.nullable and not wanted.nullable:
                because = f": {finding.note}" if finding.note else ""
                message = (
                    f"argument '{name}' may be null{because}, and {self._callee()} doesn't take null for it"
                )
                self.check.problem(where, "nullable-argument", message, "write a guard, or '… or VALUE'")
            elif not fits(found, wanted):
                message = f"argument '{name}' is {article(found)} ({found}); {self._callee()} takes {wanted}"
                self.check.problem(where, "wrong-argument-type", message, "pass a value of that type")

    def _callee(self) -> str:
        node = self.node
        ref = node.call.rsplit("/", 1)[-1] if node.call else None
        return f"{node.kind} '{ref or node.tool or node.workflow}'"

    def _parameter(self, name: str) -> Type | None:
        """What a parameter takes; None when nothing is known of it."""
        node, graph = self.node, self.check.graph
        if node.kind == "workflow":
            child = self.check.graphs.get(node.workflow or "")
            entry = next((f for f in child.task if f.name == name), None) if child else None
            return declared(entry.type) if entry else None
        tool = next((t for t in graph.tools if t.name == node.tool), None)
        function = tool.function if tool else next((f for f in graph.functions if f.ref == node.call), None)
        if tool is not None and name in tool.parameters:
            typed = tool.parameters[name]
            return typed if typed.kind != "any" else None
        if function is None or name not in function.params or name in function.nullable:
            return None
        return Type("any")

    def _prompts(self, own: Mapping[str, Found]) -> None:
        node, check = self.node, self.check
        me = {"me": Found(STR)} if any(role.members for role in self._roles()) else {}
        inner = self.scope({**own, **me})
        extra = {"memory": Found(list_of(UNKNOWN))} if node.kind == "role" else {}
        for name, raw in node.with_.items():
            finding = check.value(raw, inner, self.at("with", name), self.facts)
            found = finding.type if isinstance(raw, str) else raw_type(raw, inner)
            extra[name] = Found(found, finding.note)
        scope = self.scope({**own, **me, **extra})
        if node.human is not None:
            check.prompt(node.human.ask, scope, self.at("human", "ask"), self._written("ask"), self.facts)
            if isinstance(node.human.in_training, dict) and "value" in node.human.in_training:
                place = self.at("human", "in_training", "value")
                check.value(
                    node.human.in_training["value"], replace(scope, shows_hidden=True), place, self.facts
                )
        for role in self._roles():
            self._role_prompts(role, scope)

    def _role_prompts(self, role: RoleIR, scope: NodeScope) -> None:
        node, check = self.node, self.check
        of_role = ("roles", role.name)
        for key, at_node, at_role in (
            ("prompt", node.prompt, role.prompt),
            ("system", None, role.system),
            ("next_prompt", node.next_prompt, role.next_prompt),
        ):
            written = self._written(key)
            place = self.at(key) if written is not None else (*of_role, key)
            text = at_role if at_node is None else at_node
            facts = self.facts
            if key == "next_prompt" and role.conversation == "node":
                facts = facts | {VISITED_BEFORE}
            check.prompt(text, scope, place, self._written(key, role.name), facts)
        if role.reply.format == "choice" and isinstance(role.reply.choice, str):
            place = (*of_role, "reply", "choice")
            found = check.value(role.reply.choice, scope, place, self.facts).type
            if found.kind not in ("list", "any", "null"):
                message = f"the choice '{role.reply.choice}' is {article(found)}; it needs a list of words"
                check.problem(check.where(*place), "not-a-list", message, "give a list")

    def _written(self, key: str, role: str | None = None) -> str | None:
        """What the document has for a prompt: at the node, else at the role."""
        if self.check.doc is None:
            return None
        spec = self.check.doc.spec
        node: Any = spec.nodes.get(self.node.name)
        if key == "ask":
            return node.human.ask if node is not None else None
        found = getattr(node, key, None)
        if found is None and role is not None and role in spec.roles:
            found = getattr(spec.roles[role], key, None)
        return found

    def _writes(self, own: Mapping[str, Found]) -> None:
        """`write` happens once an item; `set` once a visit, when the items are over."""
        node = self.node
        declared_types = {entry.name: entry for entry in self.check.graph.state}
        for key, written, result, names in (
            ("write", node.write, self.value.item, own),
            ("set", node.set_, self.value.type, {} if self.value.is_list else own),
        ):
            # a malformed reply leaves state alone, so that `result` isn't null where a role's value is used
            shown = Found(non_null(result) if node.kind in ("role", "human") else result)
            scope = self.scope({**names, "result": shown}, writing=True)
            for name, raw in written.items():
                place = self.at(key, name)
                finding = self.check.value(raw, scope, place, self.facts)
                entry = declared_types.get(name)
                if entry is None or finding.issues or (key == "write" and entry.merge != "replace"):
                    continue
                self._fits_state(finding, declared(entry.type), name, place)

    def _fits_state(self, finding: Finding, wanted: Type, name: str, place: Place) -> None:
        found, where = finding.type, self.check.where(*place)
        if wanted.kind == "any":
            return
        if found.nullable and not wanted.nullable:
            because = f": {finding.note}" if finding.note else ""
            message = f"state.{name} is {wanted}, and what is written may be null{because}"
            fix = f"write a guard, '… or VALUE', or declare it nullable ('{wanted}?')"
            self.check.problem(where, "nullable-state", message, fix)
        elif not fits(found, wanted):
            message = f"state.{name} is {wanted}, and what is written is {article(found)} ({found})"
            self.check.problem(where, "state-type", message, "write a value of that type, or change the type")
