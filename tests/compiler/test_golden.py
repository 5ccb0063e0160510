"""Shipped files keep their digests: a change of what is learned shows up here, on purpose or not.

When a change is meant, write the new digests with

    MASFLOW_REFRESH_GOLDEN=1 python -m pytest tests/compiler/test_golden.py

and commit the file beside this one together with the change.
"""

import json
import os
from pathlib import Path

import pytest

from masflow.compiler import compile_experiment
from masflow.decorators import decorated

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden_digests.json")
EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.yaml"))
MAPPINGS = sorted(p.name for p in (ROOT / "mappings").glob("*.yaml"))


WORKFLOWS = sorted((ROOT / "workflows").rglob("*.yaml"))
WORKFLOWS += sorted(path for path in (ROOT / "workflows").glob("*.py") if decorated(path))


def own_mapping(name: str) -> bool:
    """Whether a mapping fits every team: it names no role of its own."""
    return "[" not in (ROOT / "mappings" / name).read_text()


CASES = [(e, None) for e in EXAMPLES] + [(e, m) for e in EXAMPLES for m in MAPPINGS if own_mapping(m)]


@pytest.mark.parametrize(("example", "mapping"), CASES)
def test_a_shipped_experiment_keeps_its_digest(example, mapping, needs):
    needs(ROOT / "examples" / example)
    file = None if mapping is None else ROOT / "mappings" / mapping
    digest = compile_experiment(ROOT / "examples" / example, mapping=file).digest
    hold(example if mapping is None else f"{example} with {mapping}", digest)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_shipped_workflow_keeps_its_digest(path, tmp_path, needs):
    needs(path)
    text = f"workflow: {path}\nmapping: {{models: {{one: {{roles: rest}}}}}}\nbase: some/base\n"
    (tmp_path / "alone.yaml").write_text(text)
    hold(
        f"workflows/{path.relative_to(ROOT / 'workflows')}",
        compile_experiment(tmp_path / "alone.yaml").digest,
    )


def hold(key, digest):
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("MASFLOW_REFRESH_GOLDEN"):
        golden[key] = digest
        GOLDEN.write_text(json.dumps(dict(sorted(golden.items())), indent=1) + "\n")
    assert golden.get(key) == digest, (
        f"{key} has digest {digest}, golden is {golden.get(key)}; see the top of this file"
    )
