"""Rewards: a function of its arguments, at one of three levels, or a quantity that is measured and paid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from masflow.errors import closest
from masflow.spec.base import Fault, Spec
from masflow.spec.names import FUNCTION, Expression, NameList, Templates


def _listed(value: object) -> object:
    """One name stands for a list of one; an empty list names nothing."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, (list, tuple)) and not value:
        raise Fault("the list is empty", code="empty", fix="name at least one, or leave the key out")
    return value


class Measure(Spec):
    """A quantity measured after some nodes."""

    after: Annotated[NameList, BeforeValidator(_listed)]
    args: Templates = Field(default_factory=dict)
    start: float = 0.0


def _reward(value: object) -> object:
    if isinstance(value, str) and value != "well_formed" and not FUNCTION.match(value):
        near = closest(value, ["well_formed"])
        message = f"unknown reward '{value}'; known: well_formed, file.py:name, module:name, role:NAME"
        fix = (
            "write 'well_formed'"
            if near
            else f"write '{value if value.endswith('.py') else 'rewards/qa.py'}:NAME'"
        )
        raise Fault(message, code="unknown-reward", fix=fix)
    return value


class Reward(Spec):
    """Who is paid what: a function of its arguments, at one of three levels."""

    name: str
    use: Annotated[str, BeforeValidator(_reward)]
    """`file.py:fn`, `module:fn`, a built-in (`well_formed`), or a frozen role as a judge (`role:NAME`)."""
    level: Literal["turn", "role", "trajectory"] | None = None
    """Default: `trajectory`; a `measure` pays turns."""
    args: Templates = Field(default_factory=dict)
    roles: Annotated[NameList, BeforeValidator(_listed)] | None = None
    nodes: Annotated[NameList, BeforeValidator(_listed)] | None = None
    when: Expression | None = None
    weight: float = 1.0
    """0 makes it a metric: reported, never trained on."""
    to: Annotated[NameList, BeforeValidator(_listed)] | None = None
    otherwise: float | None = None
    measure: Measure | None = None
    pay: dict[str, Literal["value", "gain"]] | None = None
    """Role to what it is paid of the measurement."""
    timeout_s: float = Field(default=30.0, gt=0, le=1e6)
    """Of one call, in seconds; with `batch: true` of the one call for all."""
    batch: bool = False
    """One call for all trajectories (of level turn: all turns) that are scored together; every argument is a
    list, and so is what the function gives, one value each."""
    isolate: bool = True
    """Call it in a process of its own, where it can neither end the run nor hold it up nor change it; false:
    in the run's process."""
    memory_gb: float = Field(default=4.0, gt=0, le=1e6)
    """What a call may make its own process grow to, in 10^9 bytes; where the system can limit it (Linux)."""

    hints: ClassVar[dict[str, str]] = {
        "function": "use",
        "fn": "use",
        "role": "roles",
        "node": "nodes",
        "scale": "weight",
    }

    @classmethod
    def faults(cls, data: dict[str, Any]) -> Iterator[Fault]:
        yield from cls._called(data)
        measured = data.get("measure") is not None
        if measured != (data.get("pay") is not None):
            have, need = ("measure", "pay") if measured else ("pay", "measure")
            fix = "add 'pay: {ROLE: gain}'" if measured else "add 'measure: {after: [NODE], args: {…}}'"
            yield Fault(f"'{have}' needs '{need}'", code="measure-and-pay", fix=fix, path=(have,))
        if measured:
            yield from cls._measured(data)
        elif data.get("level") in ("trajectory", None):
            for key in ("roles", "nodes"):
                if data.get(key) is not None:
                    message = (
                        f"'{key}' belongs to a reward of level turn or role; this one is of the trajectory"
                    )
                    fix = "write 'to', or add 'level: role'" if key == "roles" else "add 'level: turn'"
                    yield Fault(message, code="useless-key", fix=fix, path=(key,))
        elif data.get("to") is not None and data["level"] in ("turn", "role"):
            message = f"'to' belongs to a trajectory's reward; this one is of level {data['level']}"
            yield Fault(message, code="useless-key", fix="write 'roles'", path=("to",))

    @classmethod
    def _called(cls, data: dict[str, Any]) -> Iterator[Fault]:
        """How a function is called; a judge and a built-in aren't functions."""
        use, keys = str(data.get("use", "")), ("batch", "isolate", "memory_gb", "timeout_s")
        if use == "well_formed" or use.startswith("role:"):
            for key in keys:
                if cls.says(data, key):
                    message = f"'{key}' is for functions; '{use}' isn't one"
                    yield Fault(message, code="useless-key", fix=f"remove '{key}'", path=(key,))
        elif data.get("isolate") is False and cls.says(data, "memory_gb"):
            message = "'memory_gb' limits a process of its own, and 'isolate: false' takes none"
            yield Fault(message, code="useless-key", fix="remove one of the two", path=("memory_gb",))

    @classmethod
    def _measured(cls, data: dict[str, Any]) -> Iterator[Fault]:
        if data.get("level") in ("role", "trajectory"):
            message = f"a measured reward pays turns; 'level' is {data['level']}"
            yield Fault(message, code="measure-and-pay", fix="remove 'level'", path=("level",))
        if data.get("pay") == {}:
            yield Fault("'pay' names nobody", code="empty", fix="write {ROLE: gain}", path=("pay",))
        for key, fix in (
            ("args", "move it into 'measure'"),
            ("to", "name roles in 'pay'"),
            ("roles", "name roles in 'pay'"),
        ):
            if cls.says(data, key):
                yield Fault(f"'{key}' isn't read beside 'measure'", code="useless-key", fix=fix, path=(key,))
