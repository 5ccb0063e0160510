"""Split MBPP's rows for `examples/reflective_code.yaml` and `examples/coder_tester.yaml`.

    python examples/mbpp/make_data.py            # reads ${MASFLOW_DATA}/mbpp, writes data/mbpp/

The published split (arXiv 2108.07732, section 2.1): tasks 11 to 510 are for evaluation; the others, for
prompts, validation and training, are all trained on here. Rows stay as they are. They are CC BY 4.0 and stay
out of the repository.
"""

import gzip
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EVALUATION = range(11, 511)
"""Ids of the tasks that are never trained on."""


def split(rows: list[dict]) -> dict[str, list[dict]]:
    """Rows by file, in the order of their ids."""
    rows = sorted(rows, key=lambda row: row["task_id"])
    return {
        "train": [row for row in rows if row["task_id"] not in EVALUATION],
        "eval": [row for row in rows if row["task_id"] in EVALUATION],
    }


def main(data: Path, out: Path) -> dict[str, int]:
    """Write `train.jsonl` and `eval.jsonl` into `out`; returns the rows of each."""
    source = data / "mbpp" / "sanitized.jsonl.gz"
    if not source.exists():
        sys.exit(f"{source} not found; set MASFLOW_DATA to the folder that holds mbpp/sanitized.jsonl.gz")
    parts = split([json.loads(line) for line in gzip.decompress(source.read_bytes()).splitlines()])
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (out / f"{name}.jsonl").write_text(lines, encoding="ascii", newline="\n")
    return {name: len(rows) for name, rows in parts.items()}


if __name__ == "__main__":
    folder = Path(os.environ.get("MASFLOW_DATA") or ROOT.parent / "shared" / "data")
    for name, count in main(folder, ROOT / "data" / "mbpp").items():
        print(f"{name:6} {count:4}")
