"""Any bytes as a document end in a spec, a plan or a SpecError; never in another exception."""

import copy
import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from ruamel.yaml import YAML

from masflow.compiler import check
from masflow.errors import SpecError
from masflow.project import KINDS, Source, load_data
from masflow.spec import experiment as spec_experiment
from masflow.spec import fields as spec_fields
from masflow.spec import mapping as spec_mapping
from masflow.spec import replies as spec_replies
from masflow.spec import rewards as spec_rewards
from masflow.spec import roles as spec_roles
from masflow.spec import runtime as spec_runtime
from masflow.spec import workflow as spec_workflow
from masflow.spec.base import Spec
from masflow.spec.problems import problems_of
from masflow.spec.yaml import read_yaml

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    p for folder in ("workflows", "mappings", "runtime", "examples") for p in (ROOT / folder).glob("*.yaml")
)
TEXTS = {path.name: path.read_text() for path in DOCUMENTS}
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

YAML_WORDS = (
    r"""{{ }} { } [ ] : # - & * &a *a !!str !x | > ? ' " name edges roles start->a ->end when %YAML """
    r"""--- ... << 007 1e999 0x .inf null true ~ 2001-01-01 @ ` % , 99999999999999999999 \ud800 \ é"""
)
YAML_BITS = st.sampled_from(
    [
        *YAML_WORDS.split(),
        " ",
        "\n",
        "\n  ",
        "\t",
        ": ",
        " #",
        "- ",
        "\x00",
        "\u2028",
        "\ufeff",
        "%YAML 1.1\n",
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(
        [
            "{{ x }}",
            "{{",
            "a -> b",
            "start",
            "end",
            "rest",
            "text",
            "a.py:f",
            "state.x",
            "lib:quickstart",
            "../..",
        ]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def read_and_load(raw: bytes) -> None:
    """What `load` does with bytes, without a file."""
    try:
        data, lines, notes = read_yaml(raw, "fuzz.yaml")
        if not notes:
            load_data(data, Source("fuzz.yaml", lines), None, ROOT)
    except SpecError as error:
        assert error.problems and all(p.fix and p.message for p in error.problems)
        assert str(error)


@QUICK
@given(st.binary(max_size=200))
def test_any_bytes_end_in_a_spec_or_a_spec_error(raw):
    read_and_load(raw)


@QUICK
@given(st.lists(YAML_BITS, max_size=30).map("".join))
def test_any_pieces_of_yaml_end_in_a_spec_or_a_spec_error(text):
    read_and_load(text.encode("utf-8", errors="surrogatepass"))


@QUICK
@given(st.sampled_from(sorted(TEXTS)), st.data())
def test_a_shipped_document_with_bytes_changed_ends_in_a_spec_or_a_spec_error(name, data):
    raw = bytearray(TEXTS[name].encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw)))
        cut = data.draw(st.integers(0, 4))
        raw[at : at + cut] = data.draw(st.binary(max_size=3) | YAML_BITS.map(lambda bit: bit.encode()))
    read_and_load(bytes(raw))


def places(value, path=()):
    """Every path of a nested value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def mutate(document, data):
    """Delete, replace, rename, duplicate or wrap one value somewhere in the document."""
    path = data.draw(st.sampled_from([p for p in places(document) if p]))
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    key, action = path[-1], data.draw(st.sampled_from(["delete", "replace", "rename", "copy", "wrap"]))
    if action == "delete":
        del parent[key]
    elif action == "replace":
        parent[key] = data.draw(VALUES)
    elif action == "wrap":
        parent[key] = data.draw(st.sampled_from([[parent[key]], {"x": parent[key]}, {"role": parent[key]}]))
    elif isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    else:
        parent[data.draw(st.text(max_size=5) | st.sampled_from(["start", "end", "role", f"{key}x"]))] = (
            parent[key]
        )
        if action == "rename":
            del parent[key]


@pytest.fixture(scope="module")
def nowhere(tmp_path_factory):
    """A project of its own that holds what the shipped documents name."""
    folder = tmp_path_factory.mktemp("fuzz")
    for name in ("workflows", "mappings", "runtime", "rewards", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@FEW
@given(st.sampled_from(sorted(TEXTS)), st.data())
def test_a_shipped_document_with_values_changed_compiles_or_ends_in_problems(nowhere, name, data):
    document = read_yaml(TEXTS[name], name)[0]
    for _ in range(data.draw(st.integers(1, 3))):
        if document:
            mutate(document, data)
    text = io.StringIO()
    YAML(typ="safe", pure=True).dump(document, text)
    kind = next(p.parent.name for p in DOCUMENTS if p.name == name)
    path = nowhere / f"{kind}_{name}"
    path.write_text(text.getvalue(), encoding="utf-8")
    problems = check(path)
    assert all(p.fix and p.message and p.code for p in problems)


@QUICK
@given(st.sampled_from(sorted(KINDS)), VALUES)
def test_any_data_of_a_builder_ends_in_a_spec_or_a_spec_error(kind, value):
    try:
        load_data(value, Source("<python>"), kind, ROOT)
    except SpecError as error:
        assert error.problems


MODULES = (
    (spec_workflow, spec_roles, spec_rewards, spec_fields),
    (spec_replies, spec_mapping, spec_experiment, spec_runtime),
)
SPECS = sorted(
    {
        cls
        for modules in MODULES
        for module in modules
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, Spec) and cls is not Spec
    },
    key=lambda cls: cls.__name__,
)
ODD = VALUES | st.sampled_from(
    ["end", "lora", "frozen", "rest", "per_role", "role", "turn", 0, -1, [], {}, [None], {"a": None}]
)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(SPECS), st.data())
def test_any_values_of_known_keys_make_an_object_or_a_validation_error_of_our_words(spec, data):
    keys = data.draw(st.lists(st.sampled_from(spec.known_keys()), unique=True))
    document = {key: data.draw(ODD) for key in keys}
    try:
        spec.model_validate(document)
    except ValidationError as error:
        problems = problems_of(error, document, Source("x").where, {})
        assert problems and all(p.message and p.fix and p.code for p in problems)
