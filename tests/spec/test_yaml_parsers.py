"""libyaml's events and ruamel.yaml's make the same document, on shipped files and on damaged ones."""

import random
from pathlib import Path

import pytest

import masflow.spec.yaml as reader
from masflow.errors import SpecError
from masflow.project import find_documents

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("workflows", "mappings", "runtime", "examples", "tests/faulty")
PIECES = [*" :-?,[]{}#&*!|>'\"%@`~\\/a09=<+.é→", "\n", "\n- ", "\n  ", ": ", " #", "|\n", ">-\n", "''", "\t"]
PIECES += [
    "\\n",
    "\\/",
    "\\x41",
    "\n---\n",
    "\n...\n",
    "<<: ",
    "!!str ",
    "&a ",
    "*a",
    "? ",
    "|2\n",
    "|+\n",
    "\r\n",
]


def texts():
    for folder in FOLDERS:
        for path in sorted(find_documents(ROOT / folder)):
            raw = path.read_bytes()
            if path.suffix == ".yaml" and raw.isascii() and len(raw) < 5000:
                yield raw.decode()


def read(text):
    try:
        data, lines, problems = reader.read_yaml(text, "f.yaml")
    except SpecError as error:
        return "refused", error.problems
    return data, lines, problems


def both(text, monkeypatch):
    quick = read(text)
    with monkeypatch.context() as patch:
        patch.setattr(reader, "CSafeLoader", None)
        return quick, read(text)


def damaged(text, rng):
    if len(text) > 600:
        begin = text.rfind("\n", 0, rng.randrange(len(text) - 500)) + 1
        text = text[begin : begin + rng.randrange(100, 500)]
    for _ in range(rng.randrange(4)):
        at, what = rng.randrange(len(text) + 1), rng.random()
        if what < 0.7:
            text = text[:at] + rng.choice(PIECES) + text[at:]
        elif what < 0.85:
            text = text[:at] + text[at + rng.randrange(1, 3) :]
        else:
            begin = rng.randrange(len(text) + 1)
            text = text[:at] + text[begin : begin + rng.randrange(1, 10)] + text[at:]
    return text


def test_every_shipped_document_is_read_alike_and_by_libyaml(monkeypatch):
    assert reader.CSafeLoader is not None
    read_quickly = 0
    for text in texts():
        quick, whole = both(text, monkeypatch)
        assert quick == whole
        read_quickly += reader._quick_events(text) is not None
    assert read_quickly > 100


@pytest.mark.parametrize("seed", range(3))
def test_damaged_documents_are_read_alike_or_refused_alike(seed, monkeypatch):
    rng = random.Random(seed)
    documents, read_quickly = list(texts()), 0
    for _ in range(150):
        text = damaged(rng.choice(documents), rng)
        quick, whole = both(text, monkeypatch)
        assert quick == whole, text
        read_quickly += reader._quick_events(text) is not None
    assert read_quickly > 50
