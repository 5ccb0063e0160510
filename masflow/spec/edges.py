"""Edges as objects: parses `a -> b & c when EXPR`, chains and the long forms; knows no graph."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

from masflow.spec.base import NAME, Fault, Faults, Spec, unknown_word
from masflow.spec.types import word_text

LONG_KEYS = ("from", "to", "when", "switch")


class Edge(Spec):
    """One arrow: from each of `sources` to all of `targets` together."""

    sources: tuple[str, ...]
    targets: tuple[str, ...] = ()
    when: str | None = None
    switch: str | None = None
    """An expression; `cases` gives the target of each of its values."""
    cases: tuple[tuple[str, tuple[str, ...]], ...] = ()
    entry: int = Field(default=0, exclude=True)
    """Which item of the document's `edges` list wrote it, from 0."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Edge) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())

    def key(self) -> tuple[Any, ...]:
        return self.sources, self.targets, self.when, self.switch, self.cases


def parse_edges(raw: object) -> object:
    """Read the `edges` list; a chain of n names becomes n - 1 edges.

    Raises:
        Faults: what is wrong with which entries, all of them at once.
    """
    if not isinstance(raw, (list, tuple)):
        raise Fault(
            "edges is a list of chains",
            code="bad-edge",
            fix="write a list with entries like '- start -> a -> end'",
        )
    edges: list[Edge] = []
    faults: list[Fault] = []
    for entry, item in enumerate(raw):
        try:
            edges.extend([item] if isinstance(item, Edge) else parse_edge(item, entry))
        except Fault as fault:
            faults.append(fault.below(entry))
    if faults:
        raise Faults(faults)
    return tuple(edges)


def parse_edge(item: object, entry: int = 0) -> list[Edge]:
    """One entry of `edges`: a chain, `{from, to, when}` or `{from, switch, to: {value: target}}`."""
    if isinstance(item, str):
        return _parse_chain(item, entry)
    if isinstance(item, dict) and not any("->" in str(key) for key in item):
        return [_parse_long(item, entry)]
    if isinstance(item, dict):
        message = "YAML read this edge as a mapping because of ': ' inside"
        raise Fault(message, code="edge-is-mapping", fix="quote it: " + _quoted(_rejoin(item)))
    fix = "write 'a -> b', or {from: a, to: b, when: EXPR}"
    raise Fault(f"not an edge: {item!r}", code="bad-edge", fix=fix)


def _rejoin(item: dict[Any, Any]) -> str:
    return ", ".join(str(k) if v is None else f"{k}: {v}" for k, v in item.items())


def _quoted(text: str) -> str:
    return f'"{text}"' if '"' not in text and "\\" not in text else "'" + text.replace("'", "''") + "'"


def _parse_chain(text: str, entry: int) -> list[Edge]:
    chain, when = _split_when(text.strip())
    if chain.endswith("->") or when == "":
        message = f"'{text}' lost its end; ' #' starts a comment in YAML"
        raise Fault(message, code="cut-edge", fix="write the end, or quote the edge")
    hops = [_names(part, text) for part in chain.split("->")]
    if len(hops) < 2:
        raise Fault(f"'{text}' has no '->'", code="bad-edge", fix="write 'a -> b'")
    if when and len(hops) > 2:
        first, last = chain[: chain.rfind("->")].strip(), " -> ".join(" & ".join(hop) for hop in hops[-2:])
        fix = f"write '{first}' and '{last} when …' apart"
        raise Fault(f"'{text}': a chain with 'when' has one arrow", code="chain-with-when", fix=fix)
    return [_edge(sources=a, targets=b, when=when, entry=entry) for a, b in pairwise(hops)]


def _split_when(text: str) -> tuple[str, str | None]:
    """The chain and its condition; the condition keeps its blanks, a string may hold several."""
    found = re.search(r"\swhen(?:\s|\Z)", text)
    return (text, None) if found is None else (text[: found.start()].strip(), text[found.end() :].strip())


def _edge(**values: Any) -> Edge:
    _check(values["sources"], values["targets"])
    return Edge(**values)


def _check(sources: tuple[str, ...], targets: tuple[str, ...]) -> None:
    if "end" in sources:
        raise Fault(
            "no edge leaves 'end'", code="edge-from-end", fix="write 'start' or a node's name on the left"
        )
    if "start" in targets:
        raise Fault("no edge enters 'start'", code="edge-into-start", fix="name the first node instead")
    for side in (sources, targets):
        twice = [name for name in side if side.count(name) > 1]
        if twice:
            raise Fault(
                f"'{twice[0]}' stands twice in one fan-out",
                code="duplicate-target",
                fix=f"write '{twice[0]}' once",
            )
    if "start" in sources and len(sources) > 1:
        raise Fault(
            "'start' can't be joined with other nodes",
            code="bad-edge",
            fix="write the edge from 'start' apart",
        )


def _names(part: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in part.split("&"))
    bad = [name for name in names if not NAME.match(name)]
    if bad:
        shown = f"'{bad[0]}' isn't a node's name" if bad[0] else "a node's name is missing"
        raise Fault(f"'{text}': {shown}", code="bad-edge", fix="write 'a -> b & c when EXPR'")
    return names


def _as_names(value: object, text: str) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)) and value:
        return tuple(n for v in value for n in _names(str(v), text))
    if isinstance(value, str):
        return _names(value, text)
    raise Fault(
        f"{value!r} isn't a node's name", code="bad-edge", fix="write a node's name, or a list of them"
    )


def _parse_long(item: dict[Any, Any], entry: int) -> Edge:
    for key in item:
        if key not in LONG_KEYS:
            raise unknown_word("key", key, LONG_KEYS, path=(key,))
    for key in ("from", "to"):
        if key not in item:
            raise Fault(f"an edge in long form has no '{key}'", code="missing-key", fix=f"add '{key}: NODE'")
    text = _rejoin(item)
    sources = _as_names(item["from"], text)
    if "switch" in item:
        return _parse_switch(item, sources, text, entry)
    if isinstance(item["to"], dict):
        raise Fault(
            "'to' is a mapping, but there is no 'switch'", code="missing-key", fix="add 'switch: EXPR'"
        )
    when = item.get("when")
    if when is not None and not isinstance(when, (str, bool)):
        message = f"'when' is a bare expression, but YAML reads {when!r} here"
        raise Fault(message, code="unquoted-expression", fix='write it in quotes: when: "…"', path=("when",))
    said = str(when).lower() if isinstance(when, bool) else when
    if said is not None and not said.strip():
        raise Fault(
            "'when' is empty", code="cut-edge", fix="write a condition, or leave 'when' out", path=("when",)
        )
    return _edge(sources=sources, targets=_as_names(item["to"], text), when=said, entry=entry)


def _parse_switch(item: dict[Any, Any], sources: tuple[str, ...], text: str, entry: int) -> Edge:
    if not isinstance(item["to"], dict) or not item["to"]:
        raise Fault(
            "a switch needs a target for each value", code="bad-switch", fix="write 'to: {value: node, …}'"
        )
    if "when" in item:
        raise Fault(
            "an edge has 'when' or 'switch', not both", code="bad-switch", fix="remove 'when'", path=("when",)
        )
    if not isinstance(item["switch"], str) or not item["switch"].strip():
        raise Fault(
            "'switch' is a bare expression",
            code="bad-switch",
            fix="write 'switch: NODE.FIELD'",
            path=("switch",),
        )
    cases = tuple((word_text(value), _as_names(target, text)) for value, target in item["to"].items())
    for _, targets in cases:
        _check(sources, targets)
    return Edge(sources=sources, switch=item["switch"], cases=cases, entry=entry)


def dump_edges(edges: tuple[Edge, ...]) -> list[Any]:
    """The YAML form of edges, one entry each; `parse_edges` reads it back to equal ones."""
    dumped: list[Any] = []
    for edge in edges:
        if edge.switch is not None:
            to = {value: list(targets) for value, targets in edge.cases}
            dumped.append({"from": list(edge.sources), "switch": edge.switch, "to": to})
        else:
            arrow = f"{' & '.join(edge.sources)} -> {' & '.join(edge.targets)}"
            dumped.append(arrow if edge.when is None else f"{arrow} when {edge.when}")
    return dumped


Edges = Annotated[tuple[Edge, ...], BeforeValidator(parse_edges), PlainSerializer(dump_edges)]
