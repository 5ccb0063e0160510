"""The exported JSON Schemas accept what the reader accepts, and refuse misspelt keys."""

import functools
from pathlib import Path

import jsonschema
import pytest

from masflow.project import KINDS, find_documents, load
from masflow.spec import schema as schema_of
from masflow.spec.yaml import read_yaml

schema = functools.cache(schema_of)
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"workflow": "workflows", "mapping": "mappings", "runtime": "runtime", "experiment": "examples"}
SHIPPED = [
    (kind, p)
    for kind, folder in FOLDERS.items()
    for p in find_documents(ROOT / folder)
    if p.suffix == ".yaml"
]
REFUSED = {
    "workflow": "unknown_key unknown_role_key agents_for_roles missing_edges wrong_type_of_number "
    "out_of_bounds unknown_credit node_without_kind unknown_reply two_reply_formats node_is_a_word "
    "edge_without_arrow unknown_level long_edge_key misspelt_field_key unknown_type",
    "mapping": "mapping_key",
    "runtime": "unknown_backend",
    "experiment": "two_passes_in_one_entry ../graph/unknown_algorithm/main",
}
VARIANTS = """
name: variants
task: {a: str, b: [str], c: {x: int, y: "str?"}, d: {type: [yes, no], hidden: true, from: D}}
state: {n: {type: int, default: 0, merge: add}, seen: [str]}
roles:
  r: {prompt: "a b", reply: text, sampling: {train: {stop: "</a>"}}, conversation: node, next_prompt: "c d"}
  s: {prompt: "a b", reply: {json: {type: object, properties: {q: {type: string}}}, on_malformed: {retry: 2}}}
  t: {prompt: "a b", reply: {choice: "{{ b }}", default: {choice: x}}, copies: 3}
  u: {prompt: "a b", reply: {code: python}, names: [ann, bob]}
  v: {prompt: "a b", reply: code}
tools: {w: {use: bm25, corpus: c.jsonl, top_k: 3, parameters: {query: str}}}
nodes:
  one: {role: r, when: true, with: {k: 1}}
  two: {tool: w, args: {query: "{{ a }}"}, foreach: b, as: q, in_order: true, key: q}
  three: {human: {ask: "how so", reply: {tags: {score: int}}, in_training: {value: 3}}}
  four: {role: u, speaker: "'ann'", join: 1}
  five: {set: {n: "{{ state.n + 1 }}"}}
  six: {workflow: other.yaml, args: {a: 1}, params: {k: 2}, rewards: keep, limits: {turns: 3}}
edges:
  - start -> one & two -> three
  - {from: [three], to: four, when: ok.three}
  - {from: three, switch: three.score, to: {"1": five, "2": [six]}}
rewards: [{name: f, use: "m:f", measure: {after: one, args: {x: 1}}, pay: {r: gain}}]
"""


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_schema_is_a_json_schema(kind):
    jsonschema.Draft202012Validator.check_schema(schema(kind))


@pytest.mark.parametrize(("kind", "path"), SHIPPED, ids=lambda v: v.name if isinstance(v, Path) else v)
def test_every_shipped_document_fits_its_schema(kind, path):
    jsonschema.validate(read_yaml(path.read_bytes(), path.name)[0], schema(kind))


def test_every_shorthand_fits_the_schema_and_the_spec(tmp_path):
    path = tmp_path / "variants.yaml"
    path.write_text(VARIANTS)
    load(path)
    jsonschema.validate(read_yaml(VARIANTS, "variants")[0], schema("workflow"))


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in REFUSED for name in REFUSED[kind].split()]
)
def test_the_schema_refuses_what_an_editor_should_underline(kind, name):
    path = ROOT / "tests" / "faulty" / "spec" / f"{name}.yaml"
    data = read_yaml(path.read_bytes(), name)[0]
    assert list(jsonschema.Draft202012Validator(schema(kind)).iter_errors(data))


def test_editors_get_the_docstrings_of_the_keys():
    limits = schema("workflow")["$defs"]["Limits"]["properties"]
    assert "Model calls" in limits["turns"]["description"]


@pytest.mark.parametrize(
    ("kind", "document", "good"),
    [
        ("mapping", {"endpoint": "http://localhost:8000/v1", "model": "big"}, True),
        ("mapping", {"endpoint": {"url": "https://a.b/v1", "key_env": "KEY"}, "model": "big"}, True),
        ("mapping", {"endpoint": "localhost", "model": "big"}, False),
        ("runtime", {"engine": "vllm"}, True),
        ("runtime", {"engine": {"use": "vllm", "memory_frac": 0.5}}, True),
        ("runtime", {"engine": {"decoder": "modules", "prefix_cache_bytes": 0}}, True),
        ("runtime", {"engine": {"decoder": "bare"}}, False),
        ("runtime", {"engine": {"prefix_cache_bytes": -1}}, False),
        ("runtime", {"engine": "vlm"}, False),
    ],
)
def test_short_forms_of_servers_and_engines_are_in_the_schema(kind, document, good):
    whole = {"models": {"judge": {"roles": ["critic"], **document}}} if kind == "mapping" else document
    assert jsonschema.Draft202012Validator(schema(kind)).is_valid(whole) == good
