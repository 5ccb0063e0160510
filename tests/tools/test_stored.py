"""The cache on disk: whole or absent, made once, repaired when damaged, in memory where it must be."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from masflow.tools import search
from masflow.tools.corpus import StoredPassages
from masflow.tools.search import make, terms
from masflow.tools.stored import CACHE, MANIFEST, cache_root, content_key, stored

WORDS = [f"word{i}" for i in range(300)]
QUERIES = ["word1 word2 word3", "word7 word7", "WORD11, word250", "nowhere", "café \ud800 word9"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    search._index.cache_clear()
    yield tmp_path / "cache"
    search._index.cache_clear()


@pytest.fixture
def corpus(tmp_path):
    rng = random.Random(0)
    rows = [
        {
            "id": f"p{i}",
            "text": " ".join(rng.choices(WORDS, k=20)),
            "title": f"café {i}",
            "year": 1.1 * i,
            "odd": "\ud800",
        }
        for i in range(1200)
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert path.stat().st_size > search.SMALL_BYTES
    return str(path)


def answers(corpus, **settings):
    search._index.cache_clear()
    tool = make({"corpus": corpus, "title_field": "title", **settings})
    return json.dumps([tool(query=q) for q in QUERIES]), tool.index


def entries(cache, kind="bm25"):
    return sorted(p for p in (cache / kind).iterdir() if not p.name.startswith("."))


def test_a_stored_index_answers_as_the_one_in_memory_bit_for_bit(cache, corpus, monkeypatch):
    built, first = answers(corpus)
    again, second = answers(corpus)
    monkeypatch.setenv(CACHE, "none")
    in_memory, third = answers(corpus)
    assert built == again == in_memory
    assert isinstance(first.passages, StoredPassages) and isinstance(second.passages, StoredPassages)
    assert isinstance(third.passages, list)
    assert second.passages[:3] == third.passages[:3] and second.passages[-1] == third.passages[-1]
    assert len(entries(cache)) == 1


def test_the_index_is_memory_mapped(cache, corpus):
    answers(corpus)
    _, index = answers(corpus)
    mapped = {
        Path(line.split()[-1]).name
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(cache) in line
    }
    assert {"data.csc.index.npy", "indices.csc.index.npy", "passages.jsonl", "offsets.npy"} <= mapped
    assert index is not None


def test_other_settings_and_other_contents_are_other_entries(cache, corpus):
    answers(corpus)
    answers(corpus, top_k=2)
    assert len(entries(cache)) == 1
    answers(corpus, k1=1.2)
    assert len(entries(cache)) == 2
    with open(corpus, "a") as out:
        out.write(json.dumps({"id": "new", "text": "nowhere", "title": ""}) + "\n")
    found, _ = answers(corpus)
    assert json.loads(found)[3]["ids"] == ["new"]
    assert len(entries(cache)) == 3


def _cut(file):
    file.write_bytes(file.read_bytes()[:-9])


def _flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [_cut, _flip, os.unlink, lambda file: file.write_bytes(b"")])
@pytest.mark.parametrize("name", ["data.csc.index.npy", "vocab.index.json", "passages.jsonl", MANIFEST])
def test_a_damaged_entry_is_noticed_and_made_again(cache, corpus, name, damage):
    good, _ = answers(corpus)
    damage(entries(cache)[0] / name)
    with pytest.warns(RuntimeWarning, match="is damaged .* and is made again"):
        assert answers(corpus)[0] == good
    assert answers(corpus)[0] == good


def test_a_copied_cache_is_read_through_and_used(cache, corpus, tmp_path, monkeypatch):
    import shutil

    good, _ = answers(corpus)
    shutil.copytree(cache, tmp_path / "copied")
    monkeypatch.setenv(CACHE, str(tmp_path / "copied"))
    before = entries(tmp_path / "copied")[0].stat().st_ino
    assert answers(corpus)[0] == good
    assert entries(tmp_path / "copied")[0].stat().st_ino == before


def test_what_a_killed_process_left_is_cleared_and_never_used(cache, corpus):
    good, _ = answers(corpus)
    entry = entries(cache)[0]
    left = entry.with_name(f".{entry.name}-1-1")
    entry.rename(left)
    assert answers(corpus)[0] == good
    assert not left.exists() and entry.exists()


def test_a_cache_that_cannot_be_written_leaves_the_index_in_memory_with_a_notice(
    corpus, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv(CACHE, str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match=r"cache .* can't be used \(Not a directory\).*memory"):
        found, index = answers(corpus)
    monkeypatch.setenv(CACHE, "none")
    assert (found, isinstance(index.passages, list)) == (answers(corpus)[0], True)


def test_a_full_disk_leaves_what_was_made_in_memory_and_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE, str(tmp_path))

    def save(made, folder):
        (folder / "part").write_bytes(b"x")
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"y")

    with pytest.warns(RuntimeWarning, match=r"can't be written \(No space left on device\).*memory"):
        assert stored("thing", "k", lambda: [1], save, lambda folder: pytest.fail("nothing to open")) == [1]
    assert [p.name for p in (tmp_path / "thing").iterdir()] == [".k.lock"]


MAKES = """
import os, sys, time
from pathlib import Path
from masflow.tools.stored import stored
def make():
    with open(sys.argv[1], "a") as out: out.write("made\\n")
    time.sleep(0.3)
    if len(sys.argv) > 2: os._exit(9)
    return "value"
def save(made, folder):
    (folder / "v").write_text(made)
print(stored("thing", "k", make, save, lambda folder: (folder / "v").read_text()))
"""


def _started(cache, log, *more):
    env = {**os.environ, CACHE: str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", MAKES, str(log), *more], env=env, stdout=subprocess.PIPE, text=True
    )


def test_processes_that_need_one_entry_at_once_make_it_once(tmp_path):
    log = tmp_path / "log"
    started = [_started(tmp_path / "cache", log) for _ in range(3)]
    assert [p.communicate(timeout=60)[0] for p in started] == ["value\n"] * 3
    assert log.read_text() == "made\n"


def test_a_process_that_dies_while_it_makes_an_entry_leaves_it_to_the_next(tmp_path):
    log = tmp_path / "log"
    dying = _started(tmp_path / "cache", log, "die")
    assert dying.wait(60) == 9
    assert dying.stdout is not None
    dying.stdout.close()
    assert _started(tmp_path / "cache", log).communicate(timeout=60)[0] == "value\n"
    assert log.read_text() == "made\nmade\n"
    assert sorted(p.name for p in (tmp_path / "cache" / "thing").iterdir()) == [".k.lock", "k"]


def test_the_cache_is_the_users_unless_named(monkeypatch, tmp_path):
    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "masflow"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "masflow"
    monkeypatch.setenv(CACHE, "none")
    assert cache_root() is None


def test_a_key_follows_contents_and_settings_not_places(tmp_path):
    for name, text in (("a.jsonl", "x"), ("b.jsonl", "x"), ("c.jsonl", "y")):
        (tmp_path / name).write_text(text)
    a, b, c = (tmp_path / f"{name}.jsonl" for name in "abc")
    assert content_key([a], 1) == content_key([b], 1)
    assert len({content_key([a], 1), content_key([c], 1), content_key([a], 2)}) == 3


def test_terms_are_lower_case_words():
    assert terms("Zoë's café-2") == ["zoë", "s", "café", "2"]
