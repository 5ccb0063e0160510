"""The line between a program and its tests: values as plain data, requests, objects that stay where they are.

Runs inside the sandbox, as text before `_program.py` or `_tests.py`: stands alone, and imports of the library
only what starts in no time. What comes over a line is untrusted: it is read by the code below alone.
"""

from __future__ import annotations

import builtins

from masflow.tools._inside import Caught

MAX_BYTES = 1 << 24
"""Of one message."""
REASON_CHARS = 500


BOXED = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset,
}  # fmt: skip
TEXTUAL = {
    "Decimal": ("decimal", str), "Fraction": ("fractions", str), "date": ("datetime", str),
    "datetime": ("datetime", str), "deque": ("collections", list), "Counter": ("collections", dict),
    "OrderedDict": ("collections", dict),
}  # fmt: skip
"""Types of the library that travel as what they are made from."""


class Broken(Exception):
    """A message that isn't one."""


def pack(value, hold):
    """`value` as bytes; `hold` gives (letter, number) for what isn't plain data."""
    out = []
    _pack(value, out, hold)
    data = b"".join(out)
    if len(data) > MAX_BYTES:
        raise ValueError("a value is too large to travel")
    return data


def _put(out, letter, body):
    out.append(b"%s%d:" % (letter, len(body)))
    out.append(body)


def _pack(value, out, hold):
    if value is None:
        out.append(b"N")
    elif isinstance(value, bool):
        out.append(b"T" if value else b"F")
    elif isinstance(value, int):
        _put(out, b"i", b"%x" % value)
    elif isinstance(value, float):
        _put(out, b"f", float.hex(value).encode())
    elif isinstance(value, str):
        _put(out, b"s", str.encode(value, "utf-8", "surrogatepass"))
    elif isinstance(value, (bytes, bytearray)):
        _put(out, b"a" if isinstance(value, bytearray) else b"b", bytes(value))
    elif isinstance(value, complex):
        _put(out, b"c", f"{value.real.hex()} {value.imag.hex()}".encode())
    elif isinstance(value, range):
        _put(out, b"r", f"{value.start} {value.stop} {value.step}".encode())
    elif type(value).__name__ in TEXTUAL and type(value).__module__ == TEXTUAL[type(value).__name__][0]:
        name = type(value).__name__
        made_from = value.isoformat() if name.startswith("date") else TEXTUAL[name][1](value)
        _put(out, b"o", name.encode())
        _pack(made_from, out, hold)
    elif isinstance(value, (list, tuple, set, frozenset)):
        kind = next(name for name, cls in BOXED.items() if isinstance(value, cls))
        items = BOXED[kind](value)
        out.append({"list": b"l", "tuple": b"t", "set": b"S", "frozenset": b"Z"}[kind])
        out.append(b"%d:" % len(items))
        for item in items:
            _pack(item, out, hold)
    elif isinstance(value, dict):
        pairs = list(dict.items(value))
        out.append(b"d%d:" % len(pairs))
        for key, item in pairs:
            _pack(key, out, hold)
            _pack(item, out, hold)
    else:
        letter, number = hold(value)
        out.append(b"%s%d:" % (letter, number))


def unpack(data, held):
    """The value of `pack`; `held(letter, number)` gives what isn't plain data.

    Raises:
        Broken, ValueError and their like: it isn't one.
    """
    value, end = _unpack(data, 0, held)
    if end != len(data):
        raise Broken("more than one value")
    return value


def _unpack(data, at, held):
    letter = data[at : at + 1]
    if letter in b"NTF" and letter:
        return {b"N": None, b"T": True, b"F": False}[letter], at + 1
    stop = data.find(b":", at, at + 20)
    if stop < 0 or not data[at + 1 : stop].isdigit():
        raise Broken("no length")
    number, at = int(data[at + 1 : stop]), stop + 1
    if letter in b"mh":
        return held(letter, number), at
    if letter in b"ltSZ":
        items = []
        for _ in range(number):
            item, at = _unpack(data, at, held)
            items.append(item)
        return {b"l": list, b"t": tuple, b"S": set, b"Z": frozenset}[letter](items), at
    if letter == b"d":
        found = {}
        for _ in range(number):
            key, at = _unpack(data, at, held)
            found[key], at = _unpack(data, at, held)
        return found, at
    body, at = data[at : at + number], at + number
    if len(body) != number:
        raise Broken("cut short")
    if letter == b"o":
        made_from, at = _unpack(data, at, held)
        return _library(body.decode(), made_from), at
    return _scalar(letter, body), at


def _scalar(letter, body):
    if letter == b"s":
        return body.decode("utf-8", "surrogatepass")
    if letter == b"i":
        return int(body, 16)
    if letter == b"f":
        return float.fromhex(body.decode())
    if letter == b"b":
        return bytes(body)
    if letter == b"a":
        return bytearray(body)
    if letter == b"c":
        return complex(*map(float.fromhex, body.decode().split()))
    if letter == b"r":
        return range(*map(int, body.decode().split()))
    raise Broken("unknown letter")


def _library(name, made_from):
    module, kind = TEXTUAL[name]
    if type(made_from) is not kind:
        raise Broken("not what it is made from")
    cls = getattr(__import__(module), name)
    return cls.fromisoformat(made_from) if name.startswith("date") else cls(made_from)


# -- requests between the two sides ---------------------------------------------------------------


class Gone(Exception):
    """The other side has closed the line."""


class Raised(Exception):
    """The program raised something that isn't one of Python's own exceptions."""


def _raised(name, text):
    cls = getattr(builtins, name, None)
    if isinstance(cls, type) and issubclass(cls, Exception):
        with Caught() as caught:
            return cls(text)
        assert caught.error is not None
    return Raised(f"{name}: {text}")


def words(error):
    text = "(no message)"
    with Caught():
        text = str(error)
    return text[:REASON_CHARS]


class Peer:
    """One end of a line: asks the other side, and serves what it asks meanwhile."""

    def __init__(self, line, ops, may_hold):
        self.line, self.ops, self.may_hold = line, ops, may_hold
        self.held = {}
        self.num_calls = 0

    def hold(self, value):
        if isinstance(value, Remote):
            return b"h", value._number
        self.may_hold(value)
        self.held[id(value)] = value
        return b"m", id(value)

    def find(self, letter, number):
        """What a letter and number from the other side stand for: theirs, or one of mine that they have."""
        if letter == b"m":
            return Remote(self, number)
        if number not in self.held:
            raise Broken("unknown object")
        return self.held[number]

    def send(self, value):
        data = pack(value, self.hold)
        self.line.sendall(len(data).to_bytes(4, "big") + data)

    def receive(self):
        size = int.from_bytes(self._read(4), "big")
        if size > MAX_BYTES:
            raise Broken("too long")
        return unpack(self._read(size), self.find)

    def _read(self, size):
        parts = []
        while size:
            part = self.line.recv(min(size, 1 << 16))
            if not part:
                raise Gone("the program ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def ask(self, op, *args, **named):
        """What the other side answers; it may ask in turn before it does."""
        self.num_calls += op == "call"
        self.send(["ask", op, list(args), named])
        while True:
            message = self.receive()
            if type(message) is not list or len(message) != 4:
                raise Broken("not a message")
            if message[0] == "ask":
                self.serve(message)
            elif message[0] == "raise":
                raise _raised(str(message[1]), str(message[2]))
            else:
                _, _, value, changed = message
                if value is None and op == "call" and type(changed) is list:
                    _change(args[1:], changed)
                return value

    def serve(self, message):
        _, op, args, named = message
        reply = None
        with Caught() as caught:
            value = self.ops[op](*args, **named)
            changed = None
            if value is None and op == "call":
                changed = [arg if type(arg) in CHANGEABLE else None for arg in args[1:]]
            reply = pack(["answer", "", value, changed], self.hold)
        if isinstance(caught.error, Gone):
            raise caught.error
        if reply is None:
            name = type(caught.error).__name__
            reply = pack(["raise", name, words(caught.error), None], self.hold)
        self.line.sendall(len(reply).to_bytes(4, "big") + reply)


CHANGEABLE = (list, dict, set, bytearray)


def _change(mine, theirs):
    """Arguments that a call changed in place, where it gave None; else the change is lost."""
    for old, new in zip(mine, theirs, strict=False):
        if type(old) is not type(new) or type(old) not in CHANGEABLE:
            continue
        if isinstance(old, (list, bytearray)):
            old[:] = new
        else:
            old.clear()
            old.update(new)


class Remote:
    """An object of the other side that isn't plain data. Against plain data it is unequal and has no
    arithmetic: else an object whose `__eq__` says yes to everything would pass every test."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer, number):
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args, **named):
        return self._peer.ask("call", self, *args, **named)

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return self._peer.ask("attr", self, name)

    def __setattr__(self, name, value):
        self._peer.ask("set", self, name, value)

    def __hash__(self):
        return self._number

    def __iter__(self):
        there = self._peer.ask("iter", self)
        while True:
            found = self._peer.ask("next", there)
            if not found:
                return
            yield found[0]

    def __next__(self):
        found = self._peer.ask("next", self)
        if not found:
            raise StopIteration
        return found[0]

    def __instancecheck__(self, other):
        return isinstance(other, Remote) and self._peer.ask("isinstance", self, other) is True


def _plain(op, kind):
    def method(self, *args):
        value = self._peer.ask(op, self, *args)
        if type(value) is not kind:
            raise TypeError(f"{op} gave no {kind.__name__}")
        return value

    return method


def _both(op):
    def method(self, other):
        if type(other) is not Remote:
            return NotImplemented
        return self._peer.ask(op, self, other)

    return method


PLAIN = {"len": int, "str": str, "repr": str, "bool": bool}
BINARY = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "add": lambda a, b: a + b, "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b, "truediv": lambda a, b: a / b, "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b, "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
}  # fmt: skip
for _name, _kind in PLAIN.items():
    setattr(Remote, f"__{_name}__", _plain(_name, _kind))
for _name in BINARY:
    setattr(Remote, f"__{_name}__", _both(_name))


def _item(there, key):
    return there[key]


def _set_item(there, key, value):
    there[key] = value


def _next(there):
    for value in there:
        return [value]
    return []


Remote.__getitem__ = lambda self, key: self._peer.ask("item", self, key)  # type: ignore[attr-defined]
Remote.__setitem__ = lambda self, key, value: self._peer.ask("setitem", self, key, value)  # type: ignore[attr-defined]

OPS = {
    "call": lambda f, *args, **named: f(*args, **named),
    "attr": getattr, "set": setattr, "iter": iter, "next": _next, "len": len, "str": str, "repr": repr,
    "bool": bool, "item": _item, "setitem": _set_item, "isinstance": lambda cls, x: isinstance(x, cls),
    **BINARY,
}  # fmt: skip
