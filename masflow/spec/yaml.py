"""YAML 1.2 to plain data with a line for every value, refusing whatever YAML would change silently.

Built on an event stream: libyaml's where it surely says what ruamel.yaml says, a twentieth of its time, and
ruamel.yaml's for everything else, all errors included. Scalars are resolved here by the core schema, so that
a file means the same everywhere. Knows nothing of specs, apart from which keys hold bare expressions.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from masflow.errors import Problem, SpecError, Where, boundary

try:
    from yaml import CSafeLoader
except ImportError:  # PyYAML built without libyaml
    CSafeLoader = None

Path = tuple[str | int, ...]
MAX_DEPTH, MAX_VALUES, MAX_DIGITS = 64, 200_000, 18
MAX_SPLIT = 12
"""Pieces of one expression that are put together again for a message."""
EXPRESSION_KEYS = ("when", "foreach", "switch", "speaker", "key")
INT = re.compile(r"[-+]?[0-9]+\Z")
FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
ODD_FLOAT = re.compile(r"([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z")
CONSTANTS = {"": None, "~": None, "null": None, "Null": None, "NULL": None} | {
    word: word.lower() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")
}
OPEN_END = re.compile(r"(->|&|[-+*/%<>=!~|,(\[.]|\b(when|and|or|not|in|is|if|else))\s*\Z")


def read_yaml(raw: bytes | str, file: str) -> tuple[Any, dict[Path, int], list[Problem]]:
    """Read one document.

    Returns:
        The data (str keys; dict, list, str, int, float, bool, None), the line of every path, and the problems
        of values that YAML changed; the data is then not to be used.
    Raises:
        SpecError: not UTF-8, or not YAML at all.
    """
    text = _decode(raw, file)
    quick = _quick_events(text)
    reader = _Reader(file, text)
    if quick is not None:
        for event in quick:
            reader.take(event)
        return reader.finish()
    refused: YAMLError | None = None
    with warnings.catch_warnings(), boundary("the YAML reader") as caught:
        warnings.simplefilter("ignore")
        try:
            for event in YAML(typ="safe", pure=True).parse(text):
                reader.take(event)
        except YAMLError as error:
            refused = error
    if refused or caught.error:
        raise SpecError(reader.syntax_problem(refused, caught.error or ""))
    return reader.finish()


APART = re.compile(
    r"[^ -~\n\u00a1-\u024f\u0370-\u1fff\u2010-\u2027\u2190-\u22ff\u3001-\ud7ff]"
    r"|^%|[&*][^\s,\[\]{}]*:|![^\s=]",
    re.MULTILINE,
)
"""What YAML 1.1 and 1.2 read differently, or may: tabs, line ends of other systems, directives, anchors and
tags with a colon."""


def _quick_events(text: str) -> list[Any] | None:
    """libyaml's events of a document that both parsers read alike; None where one may not."""
    if CSafeLoader is None or APART.search(text):
        return None
    try:
        return list(yaml.parse(text, Loader=CSafeLoader))
    except yaml.YAMLError:
        return None


def _decode(raw: bytes | str, file: str) -> str:
    if isinstance(raw, str):
        return raw
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        message = f"the file isn't UTF-8: byte 0x{raw[error.start]:02x} can't be read"
        raise SpecError(
            Problem.at(Where(file, line), "not-utf8", message, "save the file as UTF-8")
        ) from None


@dataclass
class _Open:
    """A mapping or list whose end hasn't come yet."""

    value: Any
    path: Path
    line: int
    flow: bool
    start: int
    key: str | None = None
    has_key: bool = False
    parts: list[tuple[str, int, bool]] = field(default_factory=list)
    """(text, line, is plain) of the scalars of a flow collection, in order."""
    anchor: str | None = None
    dead: bool = False
    """Stands where a key should be; its content is dropped."""


class _Reader:
    """Builds data from events with an explicit stack: depth and size are bounded, nothing recurses."""

    def __init__(self, file: str, text: str):
        self.file, self.text = file, text
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []
        self.stack: list[_Open] = []
        self.anchors: dict[str, Any] = {}
        self.sizes: dict[int, int] = {}
        self.count = 0
        self.documents = 0
        self.root: Any = None

    def say(self, line: int, path: Path, code: str, message: str, fix: str) -> None:
        where = Where(self.file, line, ".".join(map(str, path)))
        self.problems.append(Problem.at(where, code, message, fix))

    def stop(self, line: int, code: str, message: str, fix: str) -> SpecError:
        path = self.stack[-1].path if self.stack else ()
        self.say(line, path, code, message, fix)
        return SpecError(self.problems)

    def finish(self) -> tuple[Any, dict[Path, int], list[Problem]]:
        self.lines.setdefault((), 1)
        return self.root, self.lines, self.problems

    def take(self, event: Any) -> None:
        name = type(event).__name__
        line = event.start_mark.line + 1 if event.start_mark else 0
        if name == "DocumentStartEvent":
            self._document(event, line)
        elif name in ("MappingStartEvent", "SequenceStartEvent"):
            self._properties(event, line)
            self._open({} if name == "MappingStartEvent" else [], event, line)
        elif name in ("MappingEndEvent", "SequenceEndEvent"):
            self._close()
        elif name == "ScalarEvent":
            self._properties(event, line)
            self._scalar(event, line)
        elif name == "AliasEvent":
            self._alias(event, line)

    def _document(self, event: Any, line: int) -> None:
        self.documents += 1
        if self.documents > 1:
            raise self.stop(
                line, "several-documents", "the file holds several documents", "keep one; remove '---'"
            )
        version = getattr(event, "version", None)
        if version is not None and tuple(version) != (1, 2):
            raise self.stop(
                1, "yaml-version", "the file asks for another YAML than 1.2", "remove the %YAML line"
            )

    def _properties(self, event: Any, line: int) -> None:
        tag = getattr(event, "ctag", None) or getattr(event, "tag", None)
        if tag is not None and str(tag) not in ("None", ""):
            self.say(
                line, self._here(), "yaml-tag", f"YAML tag '{tag}' is refused", "remove the tag; quote text"
            )
        self.count += 1
        if self.count > MAX_VALUES:
            raise self.stop(line, "too-big", f"more than {MAX_VALUES:,} values", "keep data in data files")

    def _here(self) -> Path:
        if not self.stack:
            return ()
        top = self.stack[-1]
        if isinstance(top.value, list):
            return (*top.path, len(top.value))
        return (*top.path, top.key or "?") if top.has_key else top.path

    def _open(self, value: Any, event: Any, line: int) -> None:
        top = self.stack[-1] if self.stack else None
        is_key = top is not None and isinstance(top.value, dict) and not top.has_key
        if len(self.stack) >= MAX_DEPTH:
            raise self.stop(
                line, "too-deep", f"more than {MAX_DEPTH} levels of nesting", "flatten the document"
            )
        start = event.start_mark.index
        path = self._here()
        opened = _Open(
            value, path, line, bool(event.flow_style), start, dead=is_key or bool(top and top.dead)
        )
        if is_key and not (top and top.dead):
            self._collection_as_key(line, path, start)
        elif not opened.dead:
            self.lines.setdefault(path, line)
        if event.anchor:
            opened.anchor = event.anchor
            self.anchors[event.anchor] = opened
        self.stack.append(opened)

    def _collection_as_key(self, line: int, path: Path, start: int) -> None:
        if self.text[start : start + 1] == "{" and self.text[:start].rstrip(" ").endswith("{"):
            begin = self.text[:start].rstrip(" ").rfind("{")
            self.say(line, path, *_unquoted(self.text[begin:]))
        else:
            self.say(line, path, "bad-key", "a mapping or list stands where a key should be", "quote the key")

    def _close(self) -> None:
        done = self.stack.pop()
        if done.flow and not done.dead:
            self._split_expression(done)
        if done.anchor:
            self.anchors[done.anchor] = done.value
        self.sizes[id(done.value)] = _size(done.value, self.sizes)
        self._put(done.value, done.line, done.dead)

    def _put(self, value: Any, line: int, dead: bool = False) -> None:
        if not self.stack:
            self.root = value
            return
        top = self.stack[-1]
        if isinstance(top.value, list):
            if not top.dead:
                self.lines.setdefault((*top.path, len(top.value)), line)
            top.value.append(value)
        elif not top.has_key:
            top.key, top.has_key = ("?", True) if dead or not isinstance(value, str) else (value, True)
        else:
            top.value[top.key] = value
            top.key, top.has_key = None, False

    def _key(self, text: str, line: int) -> None:
        top = self.stack[-1]
        path = (*top.path, text)
        if not top.dead:
            if text == "<<":
                self.say(line, path, "merge-key", "'<<' merge keys aren't read", "write the keys out")
            elif text in top.value:
                first = self.lines.get(path, 0)
                self.say(
                    line,
                    path,
                    "duplicate-key",
                    f"key '{text}' is written twice; first on line {first}",
                    "keep one",
                )
            else:
                self.lines[path] = line
        top.key, top.has_key = text, True

    def _scalar(self, event: Any, line: int) -> None:
        text, plain = event.value, event.style in (None, "")
        self._characters(text, line)
        top = self.stack[-1] if self.stack else None
        if top and top.flow and (plain or text):
            top.parts.append((text, line, plain))
        if top and isinstance(top.value, dict) and not top.has_key:
            self._key(text, line)
            return
        path = self._here()
        if plain:
            self._cut(event, line, path)
        value = self._resolve(text, line, path) if plain else text
        if event.anchor:
            self.anchors[event.anchor] = value
        self._put(value, line)

    def _characters(self, text: str, line: int) -> None:
        if "\0" in text:
            raise self.stop(line, "bad-character", "text holds a NUL character", "remove it")
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise self.stop(
                line, "bad-character", "text holds half a character (a surrogate)", "write the character"
            )

    def _resolve(self, text: str, line: int, path: Path) -> Any:
        if text in CONSTANTS:
            return CONSTANTS[text]
        if INT.match(text):
            digits = text.lstrip("+-")
            if len(digits) > 1 and digits[0] == "0":
                fix = f'write "{text}" for text, or {int(digits[:MAX_DIGITS])} for the number'
                self.say(
                    line, path, "leading-zero", f"YAML reads {text[:24]} as a number without its zeros", fix
                )
                return 0
            if len(digits) > MAX_DIGITS:
                self.say(
                    line, path, "too-big", f"a whole number of {len(digits)} digits", "quote it if it is text"
                )
                return 0
            return int(text)
        if re.match(r"0[ox][0-9a-fA-F]{1,16}\Z", text):
            base = 8 if text[1] == "o" else 16
            return int(text[2:], base) if base == 16 or re.match(r"0o[0-7]+\Z", text) else text
        if ODD_FLOAT.match(text) or (FLOAT.match(text) and float(text) in (float("inf"), float("-inf"))):
            self.say(
                line,
                path,
                "not-finite",
                f"{text[:24]} isn't a finite number",
                "write a finite number, or quote it",
            )
            return 0.0
        return float(text) if FLOAT.match(text) else text

    def _cut(self, event: Any, line: int, path: Path) -> None:
        end = event.end_mark.index
        stop = self.text.find("\n", end)
        rest = self.text[end : len(self.text) if stop < 0 else stop]
        comment = re.match(r"[ \t]+#.*", rest)
        text = event.value
        is_edge = len(path) > 1 and path[-2] == "edges"
        is_expression = bool(path) and path[-1] in EXPRESSION_KEYS
        if comment and (
            ((is_edge or is_expression) and _is_open(text)) or text.count("{{") > text.count("}}")
        ):
            whole = (text + rest).strip()
            kind = "edge" if is_edge else "expression"
            message = f"YAML cut this {kind} at ' #', which starts a comment; it reads '{text}'"
            self.say(line, path, "cut-at-comment", message, "quote it: " + quoted(whole))

    def _split_expression(self, done: _Open) -> None:
        parts = done.parts
        for i, (text, line, plain) in enumerate(parts):
            if not plain or not _opens(text):
                continue
            tails = range(i + 1, min(i + MAX_SPLIT, len(parts)))
            joined = {j: ", ".join(part[0] for part in parts[i : j + 1]) for j in tails}
            closing = next((j for j in tails if not _opens(joined[j])), 0)
            if closing and all(p[2] for p in parts[i : closing + 1]):
                whole = joined[closing]
                inside = "{}" if isinstance(done.value, dict) else "[]"
                message = f"YAML split an expression at its comma inside {inside}"
                self.say(line, done.path, "split-expression", message, "quote it: " + quoted(whole))
                return

    def _alias(self, event: Any, line: int) -> None:
        if event.anchor not in self.anchors:
            raise self.stop(
                line, "unknown-anchor", f"unknown YAML anchor '*{event.anchor}'", "write the value itself"
            )
        value = self.anchors[event.anchor]
        if isinstance(value, _Open):
            raise self.stop(
                line, "endless-anchor", f"YAML anchor '*{event.anchor}' holds itself", "write the value out"
            )
        self.count += self.sizes.get(id(value), 1)
        if self.count > MAX_VALUES:
            raise self.stop(
                line, "too-big", f"more than {MAX_VALUES:,} values by anchors", "keep data in data files"
            )
        top = self.stack[-1] if self.stack else None
        if top and isinstance(top.value, dict) and not top.has_key:
            self._key(str(value), line)
        else:
            self._put(value, line)

    def syntax_problem(self, error: BaseException | None, text: str) -> list[Problem]:
        """The problem of what ruamel.yaml refused, with a hint at what was probably meant."""
        line, message = 0, text
        if isinstance(error, ReaderError):
            line = self.text[: error.position].count("\n") + 1 if isinstance(error.position, int) else 0
            message = f"character {error.character!r} isn't allowed"
        elif isinstance(error, MarkedYAMLError):
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 0
            message = " ".join(
                str(part) for part in (error.problem, error.context and f"({error.context})") if part
            )
        elif error is not None:
            message = str(error)
        code, hint, fix = self._guess(line, message)
        path = self.stack[-1].path if self.stack else ()
        self.say(line, path, code, hint or f"not YAML: {message}", fix)
        return self.problems

    def _guess(self, line: int, message: str) -> tuple[str, str, str]:
        rows = self.text.split("\n")
        row = rows[line - 1] if 0 < line <= len(rows) else ""
        above = rows[line - 2] if 1 < line <= len(rows) + 1 else ""
        for candidate in (row, above):
            bare = re.search(r"(?:[:\-,\[{(]\s+|[\[,]|^\s*)(\{\{.*)", candidate)
            if bare and not re.search(r"""["']\s*\Z""", candidate[: bare.start(1)]):
                return _unquoted(bare[1])
        if "\\t" in message or "\t" in re.match(r"\s*", row)[0]:  # type: ignore[index]
            return "tab", "a tab can't indent YAML", "indent with spaces"
        if "mapping values are not allowed" in message:
            return (
                "yaml-syntax",
                f"': ' stands inside unquoted text: {row.strip()!r}",
                "quote the text that holds ': '",
            )
        if "expected ',' or" in message:
            hint = f"an unclosed or unquoted value inside [] or {{}}: {row.strip()!r}"
            return (
                "yaml-syntax",
                hint,
                'quote expressions that hold [ ] { } , or ": ", and close every bracket',
            )
        if "expected a single document" in message:
            return "several-documents", "the file holds several documents", "keep one; remove '---'"
        return "yaml-syntax", "", "check indentation, quotes and brackets on this line"


def _unquoted(text: str) -> tuple[str, str, str]:
    found = re.match(r"\{\{.*?\}\}", text)
    whole = re.sub(r"\{\{\s*(.*?)\s*\}\}", r"{{ \1 }}", found[0]) if found else "{{ … }}"
    message = f"{whole} without quotes is a mapping to YAML"
    return "unquoted-template", message, "write it in quotes: " + quoted(whole)


def quoted(text: str) -> str:
    """The text as a YAML scalar in quotes: double ones where they need no escape, else single ones."""
    return f'"{text}"' if '"' not in text and "\\" not in text else "'" + text.replace("'", "''") + "'"


def _opens(text: str) -> bool:
    """Whether a bracket or a quote opens that doesn't close."""
    bare = re.sub(r"""(?<!\w)(["']).*?\1""", "", text)
    return bool(re.search(r"""(?<!\w)["']""", bare)) or any(
        bare.count(a) > bare.count(b) for a, b in ("()", "[]", "{}")
    )


def _is_open(text: str) -> bool:
    return _opens(text) or bool(OPEN_END.search(text))


def _size(value: Any, sizes: dict[int, int]) -> int:
    items = value.values() if isinstance(value, dict) else value
    return 1 + sum(sizes.get(id(v), 1) if isinstance(v, (dict, list)) else 1 for v in items)
