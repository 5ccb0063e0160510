"""Names of things: identifiers, reserved words, bare expressions, and the validators that say so."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, WrapValidator

from masflow.spec.base import NAME, Fault, JsonValue, with_faults

FUNCTION = re.compile(r"[^\s:]+:[A-Za-z_]\w*\Z")
"""`file.py:name` or `module:name`."""

RESERVED = frozenset(
    """start end self loop range dict namespace task nodes state params visits visit history ok raw result
    item index me others memory format""".split()  # noqa: SIM905
)
"""Words that mean something in templates; no task field, node or `as` name may take them."""
CONSTANTS = frozenset(
    "true false none True False None null and or not in is if else for".split()  # noqa: SIM905
)
"""Words of the expression language itself."""


def name_fault(name: object, what: str, *, reserved: bool) -> Fault | None:
    """Why a name can't be used, with a name that could."""
    text = str(name)
    if not NAME.match(text) or not text.isascii():
        near = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")
        near = f"n{near}" if near[:1].isdigit() else near
        fix = f"write '{near}'" if near else "use letters, digits and _, not beginning with a digit"
        return Fault(f"{what} '{text}' isn't an identifier", code="bad-name", fix=fix)
    if text in CONSTANTS or (reserved and text in RESERVED):
        message = f"{what} '{text}' is a reserved word"
        return Fault(
            message, code="reserved-name", fix=f"choose another name, such as '{text}_{what.split()[-1]}'"
        )
    if text.startswith("__"):
        return Fault(
            f"{what} '{text}' begins with '__'", code="bad-name", fix=f"write '{text.strip('_') or 'name'}'"
        )
    return None


def check_names(what: str, *, reserved: bool = False, some: bool = False) -> Any:
    """A validator of the keys of a mapping.

    Args:
        what: the thing in messages, e.g. `node`.
        reserved: words that mean something in templates are refused.
        some: the mapping may not be empty.
    """

    def check(values: Any, handler: Callable[[Any], Any]) -> Any:
        if not isinstance(values, dict):
            return handler(values)
        if some and not values:
            raise Fault(f"no {what} is named", code="empty", fix=f"add a {what}")
        faults = [f.below(name) for name in values if (f := name_fault(name, what, reserved=reserved))]
        if faults:
            raise with_faults(faults, values, handler)
        return handler(values)

    return WrapValidator(check)


def _as_name(value: str) -> str:
    fault = name_fault(value, "the 'as' name", reserved=True)
    if fault is not None:
        raise fault
    return value


AsName = Annotated[str, AfterValidator(_as_name)]


def _words(value: object) -> object:
    if isinstance(value, (list, tuple)):
        counts = Counter(v for v in value if isinstance(v, str))
        twice = next((word for word, count in counts.items() if count > 1), None)
        if twice is not None:
            raise Fault(
                f"'{twice}' stands twice in the list", code="duplicate-name", fix=f"write '{twice}' once"
            )
    return value


NameList = Annotated[tuple[str, ...], BeforeValidator(_words)]
"""A list of names, each once."""


def _expression(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return value
    text = value.strip()
    if not text:
        raise Fault(
            "the expression is empty",
            code="empty-expression",
            fix="write an expression, or leave the key out",
        )
    if text.startswith("{{") and text.endswith("}}") and "{{" not in text[2:]:
        bare = text[2:-2].strip()
        message = f"this is a bare expression; '{text}' is a template"
        raise Fault(message, code="template-in-expression", fix=f'write "{bare}" without braces')
    return value


Expression = Annotated[str, BeforeValidator(_expression)]
"""A bare expression, as in `when`."""

Templates = Annotated[dict[str, JsonValue], check_names("name")]
"""Names to values; a string that is exactly one `{{ }}` keeps its type, other strings render to text."""
