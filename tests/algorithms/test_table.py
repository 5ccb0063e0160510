"""The table of `masflow/algorithms/README.md` is what the registry says, name by name.

`MASFLOW_REFRESH_GOLDEN=1` writes it anew.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from masflow.algorithms import COMMON, Preset, filled, known_algorithms
from masflow.compiler.graph import Graph
from masflow.compiler.presets import UPDATES, default_stages
from masflow.runtime.training import operator
from masflow.spec.base import Spec
from masflow.spec.experiment import ALGORITHMS, Algorithm

FOLDER = Path(str(importlib.import_module("masflow.algorithms").__file__)).parent
README = FOLDER / "README.md"
HEAD = "| `use` | paper | what it does | defaults | what differs from the paper |\n|---|---|---|---|---|\n"


def as_yaml(value: Any) -> str:
    """As a user would write it, on one line."""
    if isinstance(value, Spec):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, dict) or hasattr(value, "items"):
        return "{" + ", ".join(f"{k}: {as_yaml(v)}" for k, v in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if value is True else str(value)


def row(preset: Preset) -> str:
    defaults = [f"`{key}: {as_yaml(value)}`" for key, value in preset.fields.items()]
    defaults += [f"`passes: [{name}: {as_yaml(settings)}]`" for name, settings in preset.passes.items()]
    cells = [f"`{preset.name}`", preset.paper, preset.says, "<br>".join(defaults), preset.differs]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def table() -> str:
    presets = known_algorithms()
    return HEAD + "".join(row(presets[name]) for name in ALGORITHMS)


def test_the_table_is_what_the_registry_says():
    text = README.read_text(encoding="utf-8")
    found = re.search(r"\| `use` \|.*?\n\n", text, re.DOTALL)
    assert found, "the table begins with '| `use` |' and ends at an empty line"
    if os.environ.get("MASFLOW_REFRESH_GOLDEN"):
        README.write_text(text.replace(found.group(), f"{table()}\n"), encoding="utf-8")
        return
    assert found.group() == f"{table()}\n", "refresh it with MASFLOW_REFRESH_GOLDEN=1"


def test_the_common_defaults_are_told():
    text = README.read_text(encoding="utf-8")
    for key, value in COMMON.items():
        assert f"`{key}: {as_yaml(value)}`" in text


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_preset_says_where_it_comes_from_and_is_short(name: str):
    """Its docstring has the name, the paper and what is computed; a file of 15 to 110 lines."""
    preset, file = known_algorithms()[name], FOLDER / f"{name}.py"
    doc = str(importlib.import_module(f"masflow.algorithms.{name}").__doc__)
    papers = re.findall(r"\d{4}\.\d{5}", preset.paper)
    assert papers, preset.paper
    assert 15 <= len(file.read_text(encoding="utf-8").splitlines()) <= 110
    assert preset.says and preset.differs
    assert papers[0] in doc, f"name the paper, its equation and the defaults in the docstring of {file.name}"
    assert "Default" in doc


def test_every_stage_that_an_algorithm_may_ask_for_has_an_operator():
    graph, fields = Graph("w", credit="own"), Algorithm.model_fields
    for field in ("group", "advantage"):
        values = get_args(get_args(fields[field].annotation)[0])
        assert len(values) > 4
        for value in values:
            resolved = filled(Algorithm.model_validate({field: value, "dynamic": {}}))
            assert all(operator(stage) for stage in default_stages(graph, resolved))
    for ratio, clip in UPDATES:
        resolved = filled(Algorithm.model_validate({"ratio": ratio, "clip": clip}))
        assert all(operator(stage) for stage in default_stages(graph, resolved))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_presets_values_are_fields_and_the_users_words_win(name: str):
    preset, resolved = known_algorithms()[name], filled(Algorithm(use=name))
    for key, value in preset.fields.items():
        assert getattr(resolved, key) == value
    for key, value in COMMON.items():
        assert getattr(resolved, key) == preset.fields.get(key, value)
    assert filled(resolved) == resolved
    assert filled(Algorithm(use=name, samples=3, clip_high=0.5)).clip_high == 0.5
    assert set(preset.fixed) <= set(preset.fields)
