"""Walks the tree of an expression: the type of each part, what may be null where, what is misused.

Guards are followed: `x and x.f`, `x.f if x`, `is defined`, `is not none`, comparisons, `or`, `default`.
Knows names only through a `Scope`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from jinja2 import nodes

from masflow.compiler import inference as types
from masflow.compiler.filters import FUNCTIONS
from masflow.compiler.findings import Env, Finding, Found, Issue, Reference, Scope, article, dotted
from masflow.compiler.guards import At, Path, canonical, guards, path_of
from masflow.compiler.inference import UNKNOWN, field_of, join, list_of, non_null, nullable
from masflow.compiler.templates import DICT_METHODS, GLOBALS, STR_METHODS
from masflow.errors import closest
from masflow.spec.types import Type

__all__ = ["ExpressionWalker", "source_of"]


class ExpressionWalker:
    """Types an expression's parts, and gathers what is wrong with them."""

    def __init__(self, scope: Scope, lenient: bool):
        self.scope = scope
        self.lenient = lenient
        self.found = Finding()

    def issue(self, code: str, message: str, fix: str, node: nodes.Node) -> None:
        issue = Issue(code, message, fix, node.lineno or 1)
        if issue not in self.found.issues:
            self.found.issues.append(issue)

    def value(self, node: nodes.Node, env: Env) -> None:
        self.found.type, self.found.note = self._noted(node, env)

    def _noted(self, node: nodes.Node, env: Env) -> tuple[Type, str]:
        """Type of an expression, and why it may be null where it is a path."""
        path = path_of(node)
        if path is not None and path[0] not in ("true", "false", "none"):
            return self._path(node, path, env)
        return self.expr(node, env), ""

    def _printed(self, node: nodes.Node, env: Env) -> None:
        start = len(self.found.references)
        found, note = self._noted(node, env)
        if path_of(node):
            self.found.references[start:] = [replace(r, printed=True) for r in self.found.references[start:]]
        shown = source_of(node)
        if found.nullable:
            if not self.lenient:
                because = f": {note}" if note else ""
                fix = (
                    f"write {{% if {shown} %}}…{{% endif %}}, or '{shown} or …'"
                    if path_of(node)
                    else "add an else, or 'or …'"
                )
                self.issue("null-printed", f"prints {shown}, which may be null{because}", fix, node)
        elif found.kind == "list":
            self.issue(
                "list-printed",
                f"prints {shown}, which is a list",
                f"write '{shown} | join(', ')', bullets or json",
                node,
            )
        elif found.kind == "record":
            names = ", ".join(f"{shown}.{name}" for name, _ in found.fields[:4])
            self.issue(
                "list-printed",
                f"prints {shown}, which is a record",
                f"print a field ({names}), or json",
                node,
            )

    # conditions

    def _test(self, node: nodes.Node, env: Env) -> Type:
        """A test of truth: null is false there, at any depth of a path."""
        path = path_of(node)
        if path is not None and not isinstance(node, nodes.Const):
            return self._path(node, path, env, lenient=True)[0]
        if isinstance(node, nodes.Not):
            self._test(node.node, env)
            return types.BOOL
        if isinstance(node, nodes.And):
            self._test(node.left, env)
            return self._test(node.right, env.knowing(guards(node.left)[0]))
        if isinstance(node, nodes.Or):
            left = self._test(node.left, env)
            return join(left, self._test(node.right, env.knowing(guards(node.left)[1])))
        return self.expr(node, env)

    # expressions

    def expr(self, node: nodes.Node, env: Env) -> Type:
        found = _VISITS.get(type(node))
        if found is not None:
            return found(self, node, env)
        for child in node.iter_child_nodes():
            if isinstance(child, nodes.Expr):
                self.expr(child, env)
        return UNKNOWN

    def _const(self, node: nodes.Const, env: Env) -> Type:
        return types.type_of(node.value)

    def _name(self, node: nodes.Node, env: Env) -> Type:
        path = path_of(node)
        if path is not None:
            return self._path(node, path, env)[0]
        assert isinstance(node, (nodes.Getattr, nodes.Getitem))
        base = self._needs(node.node, env, "asked for a field")
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Const):
            self.expr(node.arg, env) if isinstance(node.arg, nodes.Expr) else None
            is_slice = isinstance(node.arg, nodes.Slice)
            return base if is_slice else (base.item or UNKNOWN if base.kind == "list" else UNKNOWN)
        key = node.attr if isinstance(node, nodes.Getattr) else node.arg.value  # type: ignore[attr-defined]
        return self._field(base, key, source_of(node.node), node)

    def _field(self, base: Type, key: Any, shown: str, node: nodes.Node) -> Type:
        found = field_of(base, key)
        if found is not None:
            return found
        if base.kind in ("record", "list"):
            inner = non_null(base.item or UNKNOWN) if base.kind == "list" else base
            names = [name for name, _ in inner.fields]
            near = closest(str(key), names)
            listed = f"; known: {', '.join(names)}" if names else f"; it is {article(inner)}"
            fix = f"write '{shown}.{near}'" if near else "use a known field"
            self.issue("unknown-field", f"'{shown}' has no field '{key}'{listed}", fix, node)
        else:
            self.issue(
                "unknown-field",
                f"'{shown}' is {article(base)}; it has no field '{key}'",
                f"write '{shown}'",
                node,
            )
        return UNKNOWN

    def _path(self, node: nodes.Node, path: Path, env: Env, lenient: bool = False) -> tuple[Type, str]:
        """Type of a name with its fields, and why it may be null."""
        root = str(path[0])
        for key in path[1:]:
            if isinstance(key, At):
                self._path(node, key.path, env)
        if root in env.local:
            found, here, note, at = None, env.local[root], "", 1
        else:
            found, at = self._root(node, path)
            if found is None:
                return UNKNOWN, ""
            here, note = found.type, found.note
        may_be_null = False
        if canonical(path[:at]) in env.facts or (found is not None and found.guards & env.facts):
            here, note = non_null(here), ""
        for i in range(at, len(path)):
            if here.nullable:
                may_be_null = True
                if not (lenient or self.lenient):
                    because = f": {note}" if note else ""
                    shown = dotted(path[:i])
                    message = f"'{shown}' may be null here{because}; '{dotted(path)}' needs a guard"
                    self.issue(
                        "null-field",
                        message,
                        f"write '{shown} and …', '{dotted(path)} or …', or default(…)",
                        node,
                    )
            here = self._field(non_null(here), path[i], dotted(path[:i]), node)
            if canonical(path[: i + 1]) in env.facts:
                here, may_be_null = non_null(here), False
        if root not in env.local:
            guarded = lenient or not may_be_null or len(path) == 1
            self.found.references.append(Reference(path, guarded, False, node.lineno or 1))
        return (nullable(here) if lenient and may_be_null else here), note

    def _root(self, node: nodes.Node, path: Path) -> tuple[Found | None, int]:
        """What the scope says of a path's first one or two names, and how many it took."""
        root = str(path[0])
        kind = self.scope.container(root)
        if (
            kind
            and len(path) > 1
            and isinstance(path[1], str)
            and path[1] not in DICT_METHODS - set(self.scope.known(root))
        ):
            found = self.scope.find(root, path[1])
            if found is None:
                self._unknown(kind, path[1], self.scope.known(root), node, f"{root}.")
            at = 2
        else:
            found, at = self.scope.find(root), 1
            if found is None and root in GLOBALS:
                message = f"'{root}' is a function"
                self.issue("function-as-value", message, f"call it: {root}(…)", node)
            elif found is None:
                self._unknown("name", root, (*self.scope.known(), *FUNCTIONS), node)
        if found is not None and found.fault is not None:
            self.issue(*found.fault, node)
        return found, at

    def _unknown(
        self, kind: str, name: str, known: Iterable[str], node: nodes.Node, prefix: str = ""
    ) -> None:
        names = sorted(set(known))
        near = closest(name, names)
        shown = ", ".join(names[:24]) + (", …" if len(names) > 24 else "") if names else "(none)"
        fix = f"write '{prefix}{near}'" if near else f"use a known {kind}"
        code = "unknown-" + kind.replace(" ", "-")
        self.issue(code, f"unknown {kind} '{name}'; known: {shown}", fix, node)

    def _needs(self, node: nodes.Node, env: Env, what: str) -> Type:
        """Type of an operand that must not be null."""
        found, note = self._noted(node, env)
        if found.nullable and not self.lenient:
            because = f": {note}" if note else ""
            shown = source_of(node)
            self.issue(
                "null-used",
                f"{shown} may be null{because}; it is {what}",
                f"guard it, or write '{shown} or …'",
                node,
            )
        return non_null(found)

    def _or(self, node: nodes.Or, env: Env) -> Type:
        left = self._test(node.left, env)
        return join(non_null(left), self.expr(node.right, env.knowing(guards(node.left)[1])))

    def _and(self, node: nodes.And, env: Env) -> Type:
        left = self._test(node.left, env)
        right = self.expr(node.right, env.knowing(guards(node.left)[0]))
        if left.kind in ("record", "any", "null"):  # its only falsy value that matters is null
            return nullable(right) if left.nullable else right
        return join(left, right)

    def _not(self, node: nodes.Not, env: Env) -> Type:
        self._test(node.node, env)
        return types.BOOL

    def _cond(self, node: nodes.CondExpr, env: Env) -> Type:
        self._test(node.test, env)
        holds, fails = guards(node.test)
        first = self.expr(node.expr1, env.knowing(holds))
        return join(first, self.expr(node.expr2, env.knowing(fails)) if node.expr2 else types.NULL)

    def _compare(self, node: nodes.Compare, env: Env) -> Type:
        left_node, left = node.expr, None
        for operand in node.ops:
            ordered = operand.op in ("lt", "lteq", "gt", "gteq")
            left = self._needs(left_node, env, "compared") if ordered else self.expr(left_node, env)
            if ordered:
                right = self._needs(operand.expr, env, "compared")
            elif operand.op in ("in", "notin"):
                right = self._needs(operand.expr, env, "searched")
            else:
                right = self.expr(operand.expr, env)
            self._words(left_node, left, operand.expr, operand.op)
            self._words(operand.expr, right, left_node, operand.op)
            left_node = operand.expr
        return types.BOOL

    def _words(self, node: nodes.Expr, type_: Type, other: nodes.Expr, op: str) -> None:
        """A choice compared with a word that isn't one of it."""
        if type_.kind != "choice":
            return
        words = [other] if op in ("eq", "ne") else list(getattr(other, "items", ()))
        for word in words:
            if (
                isinstance(word, nodes.Const)
                and isinstance(word.value, str)
                and word.value not in type_.choices
            ):
                near = closest(word.value, type_.choices)
                message = (
                    f"{source_of(node)} is never '{word.value}'; it is one of {', '.join(type_.choices)}"
                )
                fix = f"write '{near}'" if near else "compare with one of these"
                self.issue("unknown-choice", message, fix, word)

    def _math(self, node: nodes.BinExpr, env: Env) -> Type:
        left = self._needs(node.left, env, f"an operand of '{node.operator}'")
        right = self._needs(node.right, env, f"an operand of '{node.operator}'")
        kinds = {left.kind, right.kind}
        mixed = bool(kinds & {"str", "choice"}) and bool(kinds & {"int", "float", "bool", "list", "record"})
        if node.operator in ("+", "-") and mixed:
            message = f"'{node.operator}' of {article(left)} and {article(right)}"
            self.issue("operand-type", message, "join texts with '~'", node)
        if kinds == {"int"} and node.operator not in ("/", "**"):
            return types.INT
        if kinds <= {"int", "float"}:
            return types.FLOAT
        return left if left.kind == right.kind and node.operator == "+" else UNKNOWN

    def _sign(self, node: nodes.UnaryExpr, env: Env) -> Type:
        return self._needs(node.node, env, "negated")

    def _concat(self, node: nodes.Concat, env: Env) -> Type:
        for child in node.nodes:
            self._printed(child, env)
        return types.STR

    def _listed(self, node: nodes.List | nodes.Tuple, env: Env) -> Type:
        found = [self.expr(item, env) for item in node.items]
        if found and all(isinstance(i, nodes.Const) and isinstance(i.value, str) for i in node.items):
            return list_of(types.STR)
        item = found[0] if found else UNKNOWN
        for other in found[1:]:
            item = join(item, other)
        return list_of(item)

    def _dict(self, node: nodes.Dict, env: Env) -> Type:
        pairs = [(pair.key, self.expr(pair.value, env)) for pair in node.items]
        if all(isinstance(key, nodes.Const) and isinstance(key.value, str) for key, _ in pairs):
            return Type("record", fields=tuple((key.value, t) for key, t in pairs))  # type: ignore[attr-defined]
        return UNKNOWN

    def _filter(self, node: nodes.Filter, env: Env) -> Type:
        for arg in (*node.args, *(pair.value for pair in node.kwargs)):
            self.expr(arg, env)
        if node.node is None:
            return types.STR
        if node.name in ("default", "d"):
            given = self._test(node.node, env) if path_of(node.node) else self.expr(node.node, env)
            return join(non_null(given), self.expr(node.args[0], env) if node.args else types.STR)
        if node.name in types.NULL_FRIENDLY:
            self.expr(node.node, env)
            return types.STR
        given = self._needs(node.node, env, f"filtered by '{node.name}'")
        attribute = next((p.value for p in node.kwargs if p.key == "attribute"), None)
        if node.name in types.LIST_FILTERS and given.kind in (*types.SCALARS, "record"):
            self.issue(
                "not-a-list",
                f"'{node.name}' needs a list; {source_of(node.node)} is {article(given)}",
                "hand it a list",
                node,
            )
            return types.filtered(node.name, types.UNKNOWN_LIST)
        if node.name in types.TEXT_FILTERS and given.kind in ("list", "record"):
            message = f"'{node.name}' needs text; {source_of(node.node)} is {article(given)}"
            self.issue("not-text", message, "use map(…), join(…) or json", node)
        if isinstance(attribute, nodes.Const) and isinstance(attribute.value, str) and given.kind == "list":
            column = given
            for part in attribute.value.split("."):
                column = self._field(
                    column, int(part) if part.isdigit() else part, source_of(node.node), node
                )
            return column if node.name == "map" else types.filtered(node.name, given)
        return types.filtered(node.name, given)

    def _is(self, node: nodes.Test, env: Env) -> Type:
        self._test(node.node, env)
        for arg in node.args:
            self.expr(arg, env)
        return types.BOOL

    def _call(self, node: nodes.Call, env: Env) -> Type:
        spread = [arg for arg in (node.dyn_args, node.dyn_kwargs) if arg is not None]
        given = [*node.args, *(pair.value for pair in node.kwargs), *spread]
        target = node.node
        if isinstance(target, nodes.Getattr):
            return self._method(target, given, env)
        name = target.name if isinstance(target, nodes.Name) else None
        if name is None or name in env.local or (self.scope.find(name) is not None and name not in GLOBALS):
            self.expr(target, env)
            for arg in given:
                self.expr(arg, env)
            return UNKNOWN
        if name not in GLOBALS:
            self._unknown("function", name, FUNCTIONS, node)
        strict = name in FUNCTIONS and name not in ("dict", "random")
        return types.called(
            name, [self._needs(a, env, f"handed to {name}()") if strict else self.expr(a, env) for a in given]
        )

    def _method(self, target: nodes.Getattr, given: list[nodes.Expr], env: Env) -> Type:
        for arg in given:
            self.expr(arg, env)
        if (
            target.attr in DICT_METHODS
            and (path := path_of(target.node))
            and self.scope.container(str(path[0]))
        ):
            self.expr(target.node, env)
            return UNKNOWN
        base = self._needs(target.node, env, f"asked for {target.attr}()")
        if base.kind in ("str", "choice"):
            if target.attr in STR_METHODS:
                return types.method_of_text(target.attr)
            message = f"text has no method '{target.attr}'"
            near = closest(target.attr, STR_METHODS)
            self.issue("unknown-method", message, f"write '{near}'" if near else "use a filter", target)
        elif base.kind == "record" and target.attr in DICT_METHODS:
            return UNKNOWN
        elif base.kind not in ("any", "null"):
            message = f"{article(base)} has no method '{target.attr}'"
            self.issue("unknown-method", message, "use a filter", target)
        return UNKNOWN


_OPERATORS = (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow)
_VISITS: dict[type[nodes.Node], Any] = {
    nodes.Const: ExpressionWalker._const,
    nodes.Name: ExpressionWalker._name,
    nodes.Getattr: ExpressionWalker._name,
    nodes.Getitem: ExpressionWalker._name,
    nodes.Or: ExpressionWalker._or,
    nodes.And: ExpressionWalker._and,
    nodes.Not: ExpressionWalker._not,
    nodes.CondExpr: ExpressionWalker._cond,
    nodes.Compare: ExpressionWalker._compare,
    nodes.Neg: ExpressionWalker._sign,
    nodes.Pos: ExpressionWalker._sign,
    nodes.Concat: ExpressionWalker._concat,
    nodes.List: ExpressionWalker._listed,
    nodes.Tuple: ExpressionWalker._listed,
    nodes.Dict: ExpressionWalker._dict,
    nodes.Filter: ExpressionWalker._filter,
    nodes.Test: ExpressionWalker._is,
    nodes.Call: ExpressionWalker._call,
    **dict.fromkeys(
        (nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow),
        ExpressionWalker._math,
    ),
}


def source_of(node: nodes.Node) -> str:
    """An expression in messages: its path, or what kind of thing it is."""
    if isinstance(node, nodes.Expr) and (path := path_of(node)) is not None:
        return dotted(path)
    if isinstance(node, nodes.Filter):
        return f"{source_of(node.node)} | {node.name}" if node.node else node.name
    if isinstance(node, nodes.Call):
        return f"{source_of(node.node)}(…)"
    if isinstance(node, (nodes.Getattr, nodes.Getitem)):
        return f"{source_of(node.node)}.{getattr(node, 'attr', '…')}"
    if isinstance(node, nodes.CondExpr):
        return f"'… if {source_of(node.test)}'"
    return "the expression"
