"""Workflow documents → graphs: prompts read, edges ordered, members named, parameters resolved, sub-workflows
found.

What a graph means is `verify`'s business; here only what can't be read or found is a problem.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from masflow.compiler.arrows import Arrows, lower_edges
from masflow.compiler.bases import resolve_base
from masflow.compiler.documents import Doc, file_hash
from masflow.compiler.embedding_models import embedding_faults
from masflow.compiler.graph import (
    START,
    FunctionIR,
    Graph,
    Node,
    ProgramIR,
    RoleIR,
    StateFieldIR,
    TaskFieldIR,
    ToolIR,
)
from masflow.compiler.limits import limits_of, raise_limits
from masflow.compiler.programs import UNLIMITED, agent_tool, function_of, load_workflow, split_ref
from masflow.compiler.regions import with_joins
from masflow.compiler.routing import lower_rewards
from masflow.errors import Problem, SpecError, closest, unknown
from masflow.project import Loaded
from masflow.spec import workflow as ws
from masflow.spec.program import Program
from masflow.spec.tools import BUILTINS, settings_faults, usual_at_once
from masflow.trace import DEFAULT_POLICY

__all__ = ["MERGE_RULES", "Lowering", "doc_of"]

MERGE_RULES = ("replace", "append", "extend", "add", "union", "update")
MAX_DEPTH = 16
MAX_PLACES = 1024
"""Sub-workflow calls, calls inside them counted, that one team may have."""


def doc_of(loaded: Loaded[Any], spec: ws.Workflow | None = None, prefix: tuple[str | int, ...] = ()) -> Doc:
    return Doc(spec or loaded.spec, loaded.source, loaded.path, loaded.root, prefix)


@dataclass
class Lowering:
    """Everything gathered while one team is lowered: its graphs by name, their documents, all problems."""

    problems: list[Problem] = field(default_factory=list)
    graphs: dict[str, Graph] = field(default_factory=dict)
    docs: dict[str, Doc] = field(default_factory=dict)
    incomplete: set[str] = field(default_factory=set)
    """Graphs with an edge that could not be read: their flow is not judged."""
    _key_of: dict[tuple[Any, ...], str] = field(default_factory=dict)
    _stack: list[tuple[Any, ...]] = field(default_factory=list)
    _loaded: dict[tuple[Path, str | None], Loaded[Any] | None] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)

    def workflow(
        self, doc: Doc, params: Mapping[str, Any], *at: str | int, by: Doc | None = None
    ) -> str | None:
        """Lower one workflow with its parameters set; the same pair is lowered once.

        Args:
            at, by: where `params` was written, for problems.
        Returns:
            The graph's name in `graphs`; None when it can't be lowered (a recursion).
        """
        own = doc.spec.function if isinstance(doc.spec, Program) else ""
        place = (str(doc.path), own, doc.prefix, id(doc.spec) if doc.path is None else 0)
        where = (by or doc).where(*at)
        if place in self._stack:
            message, fix = f"workflow '{doc.spec.name}' calls itself", "write the repetition as a loop"
            self.problems.append(Problem.at(where, "recursive-workflow", message, fix))
            return None
        if len(self._stack) >= MAX_DEPTH:
            message = f"sub-workflows are nested more than {MAX_DEPTH} deep"
            self.problems.append(Problem.at(where, "too-many-calls", message, "nest them less"))
            return None
        params = self._params(doc, params, by or doc, at)
        identity = (*place, json.dumps(params, sort_keys=True, default=str))
        if identity in self._key_of:
            return self._key_of[identity]
        key = self._new_key(doc)
        self._key_of[identity] = key
        self.docs[key] = doc
        self.graphs[key] = Graph(key)
        self._stack.append(place)
        self.graphs[key] = _GraphLowering(self, doc, key, params).graph()
        self._stack.pop()
        called = [node.workflow for node in self.graphs[key].nodes if node.workflow]
        self._places[key] = 1 + sum(self._places[name] for name in called)
        if self._places[key] > MAX_PLACES:
            message = f"workflow '{key}' calls {self._places[key]} sub-workflows, those inside them counted"
            fix = f"at most {MAX_PLACES} are allowed: use foreach, or fewer levels"
            self.problems.append(Problem.at(doc.where("nodes"), "too-many-calls", message, fix))
            self.graphs[key] = replace(self.graphs[key], nodes=_without_calls(self.graphs[key]))
            self._places[key] = 1
        return key

    def _new_key(self, doc: Doc) -> str:
        names = [doc.spec.name, doc.path.stem if doc.path else doc.spec.name]
        names += [f"{doc.spec.name}_{n}" for n in range(2, len(self.graphs) + 3)]
        return next(name for name in names if name not in self.graphs)

    def _params(
        self, doc: Doc, given: Mapping[str, Any], by: Doc, at: tuple[str | int, ...]
    ) -> dict[str, Any]:
        for name in given:
            if name not in doc.spec.params:
                self.problems.append(unknown(by.where(*at, name), "param", name, doc.spec.params))
        return {name: given.get(name, default) for name, default in doc.spec.params.items()}

    def child(self, doc: Doc, ref: str | ws.Workflow, *at: str | int) -> Doc | None:
        """The document of a sub-workflow: named in `workflows:`, written in place, or a file."""
        if isinstance(ref, ws.Workflow):
            return doc.inner(ref, *at)
        if ref in doc.spec.workflows:
            named = doc.spec.workflows[ref]
            at = ("workflows", ref)
            if isinstance(named, ws.Workflow):
                return doc.inner(named, *at)
            ref = named
        elif doc.spec.workflows and re.fullmatch(r"\w+", ref):
            self.problems.append(unknown(doc.where(*at), "workflow", ref, doc.spec.workflows))
            return None
        file, name = split_ref(ref)
        path = doc.resolve(file, "workflow file", self.problems, *at)
        if path is None:
            return None
        if (path, name) not in self._loaded:
            try:
                self._loaded[path, name] = load_workflow(path, name, doc.where(*at))
            except SpecError as error:
                self.problems.extend(error.problems)
                self._loaded[path, name] = None
        loaded = self._loaded[path, name]
        return doc_of(loaded) if loaded else None


class _GraphLowering:
    """One workflow on its way to a graph."""

    def __init__(self, lowering: Lowering, doc: Doc, key: str, params: dict[str, Any]):
        self.all = lowering
        self.doc = doc
        self.key = key
        self.params = params
        self.problems = lowering.problems

    def graph(self) -> Graph:
        doc, spec = self.doc, self.doc.spec
        arrows = lower_edges(doc, self.problems)
        if not arrows.complete:
            self.all.incomplete.add(self.key)
        graph = Graph(
            name=self.key,
            task=tuple(TaskFieldIR(n, f.type, f.hidden, f.source or n) for n, f in spec.task.items()),
            params=self.params,
            state=tuple(self._state(name, entry) for name, entry in spec.state.items()),
            roles=tuple(self._role(name, role) for name, role in spec.roles.items()),
            tools=tuple(self._tool(name, tool) for name, tool in spec.tools.items()),
            nodes=tuple(self._node(name, node, arrows) for name, node in spec.nodes.items()),
            start=arrows.of(START),
            output=spec.output,
            rewards=lower_rewards(doc, self.problems),
            credit=spec.credit,
            discount=spec.discount,
            limits=limits_of(spec.limits),
            outcomes={**DEFAULT_POLICY, **spec.outcomes},
            summary=spec.summary,
            where=doc.where(),
        )
        graph = replace(graph, functions=self._functions(graph))
        if isinstance(spec, Program):
            return self._program(graph, spec)
        return graph if self.key in self.all.incomplete else raise_limits(with_joins(graph), spec)

    def _program(self, graph: Graph, spec: Program) -> Graph:
        """A graph that a function plays: its nodes are what may be called, its tools those workflows too."""
        most = spec.limits.visits or UNLIMITED
        agents, fields = [], {entry.name: entry for entry in graph.task}
        called = {name for role in graph.roles for name in role.tools}
        for node in graph.nodes:
            if node.kind == "workflow" and node.name in called and node.workflow is not None:
                made = agent_tool(node.name, self.all.graphs[node.workflow], fields, node.where)
                if isinstance(made, Problem):
                    self.problems.append(made)
                else:
                    agents.append(made)
        return replace(
            graph,
            nodes=tuple(replace(node, max_visits=most) for node in graph.nodes),
            tools=(*graph.tools, *agents),
            program=ProgramIR(function_of(spec.function), spec.timeout_s),
        )

    def _functions(self, graph: Graph) -> tuple[FunctionIR, ...]:
        refs = [n.call for n in graph.nodes if n.call]
        answers = [n.human.in_training for n in graph.nodes if n.human]
        refs += [str(a["call"]) for a in answers if isinstance(a, dict) and "call" in a]
        return tuple(FunctionIR(ref) for ref in dict.fromkeys(refs))

    def _state(self, name: str, entry: ws.StateField) -> StateFieldIR:
        function = None
        if entry.merge not in MERGE_RULES:
            if ":" in entry.merge:
                ref = self.doc.function(entry.merge, self.problems, "state", name, "merge")
                function = FunctionIR(ref) if ref else None
            else:
                where = self.doc.where("state", name, "merge")
                self.problems.append(unknown(where, "merge rule", entry.merge, MERGE_RULES))
        return StateFieldIR(name, entry.type, entry.default, entry.merge, function)

    def _role(self, name: str, role: ws.Role) -> RoleIR:
        doc, at = self.doc, ("roles", name)
        prompt, _ = doc.text(role.prompt, self.problems, *at, "prompt")
        system, _ = doc.text(role.system, self.problems, *at, "system")
        following, _ = doc.text(role.next_prompt, self.problems, *at, "next_prompt")
        return RoleIR(
            name=name,
            prompt=prompt,
            system=system,
            reply=role.reply,
            sampling=role.sampling,
            conversation=role.conversation,
            next_prompt=following,
            tools=role.tools,
            max_calls=role.max_calls,
            approve=role.approve is not None,
            handoff=role.handoff,
            members=self._members(name, role),
            is_family=role.names is not None,
            where=doc.where(*at),
        )

    def _members(self, name: str, role: ws.Role) -> tuple[str, ...]:
        key = "copies" if role.copies is not None else "names"
        at = ("roles", name, key)
        if role.copies is None and role.names is None:
            return ()
        num_before = len(self.problems)
        raw = role.copies if role.copies is not None else role.names
        value = self.doc.rendered(
            list(raw) if isinstance(raw, tuple) else raw, self.params, self.problems, *at
        )
        if len(self.problems) > num_before:
            return ()
        if role.copies is not None:
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1024:
                message = f"copies must be a whole number from 1 to 1024, got {value!r}"
                self._problem("bad-copies", message, "write a number", *at)
                return ()
            return tuple(f"{name}_{i}" for i in range(value))
        good = (
            isinstance(value, (list, tuple))
            and value
            and all(isinstance(v, str) and v.isidentifier() for v in value)
        )
        if not good or len(set(value)) < len(value):
            message = f"names must be a list of different identifiers, got {value!r}"
            self._problem("bad-names", message, "write names such as [ann, bob]", *at)
            return ()
        return tuple(value)

    def _tool(self, name: str, tool: ws.Tool) -> ToolIR:
        doc, at = self.doc, ("tools", name)
        rendered = doc.rendered(tool.settings, self.params, self.problems, *at)
        settings = {**rendered} if isinstance(rendered, dict) else {}
        function, parameters, summary = FunctionIR(tool.use), tool.parameters or {}, tool.summary or ""
        paths: list[Path] = []
        models: list[str] = []
        if tool.use in BUILTINS:
            built_in = BUILTINS[tool.use]
            for fault in settings_faults(tool.use, settings):
                self._problem(fault.code, f"tool '{name}': {fault.message}", fault.fix, *at, *fault.path)
            paths = self._data_settings(settings, built_in.data_settings, at)
            models = [self._model_setting(settings, key, at) for key in built_in.model_settings]
            names = tuple(built_in.parameters)
            more = built_in.optional
            function = FunctionIR(tool.use, params=(*names, *more), required=names, types=more)
            parameters, summary = tool.parameters or built_in.parameters, summary or built_in.summary
        elif ":" in tool.use:
            ref = doc.function(tool.use, self.problems, *at, "use")
            function = FunctionIR(ref or "")
            files = tuple(k for k, v in settings.items() if isinstance(v, str) and self._is_file(v))
            paths = self._data_settings(settings, files, at)
        else:
            message = (
                f"unknown tool '{tool.use}'; known: {', '.join(sorted(BUILTINS))}, file.py:fn, module:fn"
            )
            near = closest(tool.use, BUILTINS)
            fix = f"write '{near}'" if near else "use a built-in or name a function"
            self._problem("unknown-tool", message, fix, *at, "use")
        return ToolIR(
            name=name,
            function=function,
            settings=settings,
            scope=tool.scope,
            approve=tool.approve is not None,
            summary=summary,
            parameters={name: type_ for name, type_ in parameters.items() if name not in tool.bind},
            bind=dict(tool.bind),
            timeout_s=tool.timeout_s,
            at_once=1 if tool.scope == "episode" else tool.at_once or usual_at_once(tool.use, settings),
            data_hash=",".join([*(file_hash(p) for p in paths), *models]),
            where=doc.where(*at),
        )

    def _data_settings(
        self, settings: dict[str, Any], names: tuple[str, ...], at: tuple[str, ...]
    ) -> list[Path]:
        """Makes the settings that name files absolute, in place."""
        found = []
        for name in names:
            if isinstance(settings.get(name), str):
                path = self.doc.data_file(settings[name], "data file", self.problems, *at, name)
                if path is not None:
                    settings[name] = str(path)
                    found.append(path)
        return found

    def _model_setting(self, settings: dict[str, Any], name: str, at: tuple[str, ...]) -> str:
        """Makes a setting that names a model's folder absolute, in place; the model's hash."""
        doc, raw = self.doc, settings.get(name)
        if not isinstance(raw, str):
            return ""
        where = (*doc.prefix, *at, name)
        try:
            found, digest = resolve_base(raw, doc.source, where, doc.path, doc.root)
        except SpecError as error:
            self.problems.extend(error.problems)
            return ""
        settings[name] = str(found)
        if Path(str(found)).is_dir():
            for message, fix in embedding_faults(Path(str(found)), settings):
                self._problem("tool-setting", f"tool '{at[-1]}': {message}", fix, *at)
        return digest

    def _is_file(self, text: str) -> bool:
        if not re.fullmatch(r"(\$\{\w+\})?[\w./-]+\.\w+", text):
            return False
        beside = self.doc.path.parent if self.doc.path else self.doc.root
        return "${" in text or (beside / text).is_file() or (self.doc.root / text).is_file()

    def _node(self, name: str, node: Any, arrows: Arrows) -> Node:
        doc, at = self.doc, ("nodes", name)
        for limit in ("turns", "items", "tokens"):
            if node.limits and getattr(node.limits, limit) is not None:
                message = f"a node's limits bound its visits; '{limit}' belongs to the workflow's limits"
                self._problem(
                    "node-limit", message, f"move '{limit}' to the workflow's limits", *at, "limits", limit
                )
        lowered = Node(
            name=name,
            kind=_kind(node),
            arrows=arrows.of(name),
            switch=arrows.switch.get(name),
            when=node.when,
            foreach=node.foreach,
            as_name=node.as_,
            in_order=node.in_order,
            key=node.key,
            join=node.join,
            with_=node.with_,
            args=getattr(node, "args", {}),
            write=node.write,
            set_=node.set_,
            max_visits=(node.limits.visits if node.limits else None) or limits_of(doc.spec.limits).visits,
            where=doc.where(*at),
        )
        return self._with_kind(lowered, node)

    def _with_kind(self, lowered: Node, node: Any) -> Node:
        at = ("nodes", lowered.name)
        if isinstance(node, ws.RoleNode):
            return self._role_node(lowered, node)
        if isinstance(node, ws.ToolNode):
            return replace(lowered, tool=node.tool)
        if isinstance(node, ws.CallNode):
            return replace(lowered, call=self.doc.function(node.call, self.problems, *at, "call"))
        if isinstance(node, ws.WorkflowNode):
            child = self.all.child(self.doc, node.workflow, *at, "workflow")
            params = self.doc.rendered(node.params, self.params, self.problems, *at, "params") or {}
            key = self.all.workflow(child, params, *at, "params", by=self.doc) if child else None
            return replace(lowered, workflow=key, params=params, keep_rewards=node.rewards == "keep")
        if isinstance(node, ws.HumanNode):
            return replace(lowered, human=self._human(node.human, at))
        return lowered

    def _role_node(self, lowered: Node, node: ws.RoleNode) -> Node:
        at = ("nodes", lowered.name)
        role = self.doc.spec.roles.get(node.role)
        prompt, file = self.doc.text(node.prompt, self.problems, *at, "prompt")
        following, _ = self.doc.text(node.next_prompt, self.problems, *at, "next_prompt")
        if role and prompt is None:
            prompt, file = self.doc.text(role.prompt, [], "roles", node.role, "prompt")
        if role and following is None:
            following, _ = self.doc.text(role.next_prompt, [], "roles", node.role, "next_prompt")
        return replace(
            lowered,
            role=node.role,
            among=node.among or (),
            speaker=node.speaker,
            prompt=prompt,
            next_prompt=following,
            prompt_file=file,
        )

    def _human(self, human: ws.Human, at: tuple[str, ...]) -> ws.Human:
        ask, _ = self.doc.text(human.ask, self.problems, *at, "human", "ask")
        answer = human.in_training
        if isinstance(answer, dict) and "call" in answer:
            ref = self.doc.function(str(answer["call"]), self.problems, *at, "human", "in_training", "call")
            answer = {"call": ref} if ref else None
        return human.model_copy(update={"ask": ask or "", "in_training": answer})

    def _problem(self, code: str, message: str, fix: str, *at: str | int) -> None:
        self.problems.append(Problem.at(self.doc.where(*at), code, message, fix))


def _without_calls(graph: Graph) -> tuple[Node, ...]:
    return tuple(replace(node, workflow=None) for node in graph.nodes)


def _kind(node: Any) -> Any:
    return next((k for k in ws.NODE_KINDS if hasattr(node, k)), "set")
