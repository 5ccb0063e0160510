"""The split of MBPP's rows that the coding examples read."""

import gzip
import json
import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "mbpp" / "make_data.py"))


def test_published_evaluation_tasks_are_never_trained_on(tmp_path):
    (tmp_path / "mbpp").mkdir()
    rows = [{"task_id": i, "prompt": f"task {i}"} for i in (974, 511, 510, 11, 10, 2)]
    lines = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "mbpp" / "sanitized.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert SCRIPT["main"](tmp_path, tmp_path / "out") == {"train": 4, "eval": 2}
    ids = {}
    for name in ("train", "eval"):
        text = (tmp_path / "out" / f"{name}.jsonl").read_text()
        ids[name] = [json.loads(line)["task_id"] for line in text.splitlines()]
    assert ids == {"train": [2, 10, 511, 974], "eval": [11, 510]}


def test_missing_data_is_said_with_the_way_out(tmp_path):
    with pytest.raises(SystemExit, match="set MASFLOW_DATA"):
        SCRIPT["main"](tmp_path, tmp_path / "out")
