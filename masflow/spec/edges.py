"""Edges as objects: parses `a -> b & c when EXPR`, chains and the long forms; knows no graph."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from masflow.spec.base import Spec

NAME = re.compile(r"[A-Za-z_]\w*\Z")


class Edge(Spec):
    """One arrow: from each of `sources` to all of `targets` together."""

    sources: tuple[str, ...]
    targets: tuple[str, ...] = ()
    when: str | None = None
    switch: str | None = None
    """An expression; `cases` gives the target of each of its values."""
    cases: tuple[tuple[str, tuple[str, ...]], ...] = ()
    entry: int = Field(0, exclude=True)
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
        ValueError: what is wrong with which entry (`entry N: …`), all of them at once.
    """
    if not isinstance(raw, (list, tuple)):
        raise ValueError("edges is a list of chains such as 'start -> a -> end'")
    edges: list[Edge] = []
    problems: list[str] = []
    for entry, item in enumerate(raw):
        try:
            edges.extend([item] if isinstance(item, Edge) else parse_edge(item, entry))
        except ValueError as error:
            problems.append(f"entry {entry}: {error}")
    if problems:
        raise ValueError("\n".join(problems))
    return tuple(edges)


def parse_edge(item: object, entry: int = 0) -> list[Edge]:
    """One entry of `edges`: a chain, `{from, to, when}` or `{from, switch, to: {value: target}}`."""
    if isinstance(item, str):
        return _parse_chain(item, entry)
    if isinstance(item, dict) and "from" in item:
        return [_parse_long(item, entry)]
    if isinstance(item, dict):
        raise ValueError(f"YAML read this edge as a mapping because of ': ' inside; quote it: \"{_rejoin(item)}\"")
    raise ValueError(f"not an edge: {item!r}; write 'a -> b', or {{from: a, to: b, when: EXPR}}")


def _rejoin(item: dict[Any, Any]) -> str:
    return ", ".join(f"{k}: {v}" for k, v in item.items())


def _parse_chain(text: str, entry: int) -> list[Edge]:
    chain, _, when = re.sub(r"\s+", " ", text).partition(" when ")
    hops = [_names(part, text) for part in chain.split("->")]
    if len(hops) < 2:
        raise ValueError(f"'{text}' has no '->'; write 'a -> b'")
    if when and len(hops) > 2:
        raise ValueError(f"'{text}': a chain with 'when' has one arrow; write the guarded arrow by itself")
    if text.rstrip().endswith(" when") or text.rstrip().endswith("->"):
        raise ValueError(f"'{text}' lost its end; ' #' starts a comment in YAML: quote the edge")
    return [
        Edge(sources=a, targets=b, when=when.strip() or None, entry=entry) for a, b in zip(hops, hops[1:], strict=False)
    ]


def _names(part: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in part.split("&"))
    bad = [name for name in names if not NAME.match(name)]
    if bad:
        raise ValueError(f"'{text}': {bad[0]!r} isn't a node's name; write 'a -> b & c when EXPR'")
    return names


def _as_names(value: object, text: str) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(n for v in value for n in _names(str(v), text))
    return _names(str(value), text)


def _parse_long(item: dict[Any, Any], entry: int) -> Edge:
    extra = [str(key) for key in item if key not in ("from", "to", "when", "switch")]
    if extra:
        raise ValueError(f"unknown key '{extra[0]}' in an edge; known: from, switch, to, when")
    text = str(item)
    sources = _as_names(item["from"], text)
    if "to" not in item:
        raise ValueError(f"an edge from {' & '.join(sources)} has no 'to'")
    if "switch" in item:
        if not isinstance(item["to"], dict):
            raise ValueError("a switch has 'to: {value: node, …}'")
        cases = tuple((str(value), _as_names(target, text)) for value, target in item["to"].items())
        return Edge(sources=sources, switch=str(item["switch"]), cases=cases, entry=entry)
    when = item.get("when")
    return Edge(
        sources=sources, targets=_as_names(item["to"], text), when=None if when is None else str(when), entry=entry
    )


Edges = Annotated[tuple[Edge, ...], BeforeValidator(parse_edges)]
