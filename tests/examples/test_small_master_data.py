"""The data of `examples/small/master_team`: what the script writes, and that its tasks can be done."""

import gzip
import json
import runpy
from pathlib import Path

import pytest

from masflow.compiler import compile_experiment
from masflow.models.scripted import ScriptedEngine
from masflow.models.wordpiece import make_wordpiece
from masflow.rl.score import score
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from masflow.spec.mapping import Wordpiece
from masflow.trace import EpisodeKey

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples" / "small" / "master_team"
MADE = runpy.run_path(str(DATA / "make_data.py"))


def rows_of(file: Path) -> list[dict]:
    raw = file.read_bytes()
    text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode("ascii")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def plan():
    return compile_experiment(ROOT / "examples/small/master_team.yaml")


def test_the_script_writes_the_shipped_files(tmp_path):
    counts = MADE["main"](tmp_path)
    names = {path.name for path in DATA.glob("*.jsonl*")}
    assert names == set(counts) and all(rows_of(DATA / n) == rows_of(tmp_path / n) for n in names)
    assert all((DATA / n).stat().st_size < 200_000 for n in names)


def test_no_town_and_no_good_is_both_trained_and_held_out():
    (held_towns, towns), (held_goods, goods) = map(MADE["halves"], MADE["draw_names"]())
    held, known = {*held_towns, *held_goods}, {*towns, *goods}
    names = held | known
    shown = rows_of(DATA / "demos.jsonl.gz")
    trained = [row["question"] for row in rows_of(DATA / "train.jsonl.gz")]
    trained += [json.dumps(row).replace('"', " ") for row in shown]
    assert {word for text in trained for word in text.split()} & names <= known
    asked = [row["question"] for row in rows_of(DATA / "eval.jsonl.gz")]
    assert {word for text in asked for word in text.split()} & names <= held


def by_rule(row):
    """What agents say that do everything right."""
    call, words = MADE["call"], row["question"].split()
    turns = {"decide": [*row["needs"], f"finish {(row['answers'] or ['done'])[0]}"]}
    found = row["parts"]["qa"][0]
    turns["qa"] = [call("wiki", query=f" {words[0]} {words[2]} " if "of" in words else ""), found]
    [(name, want)] = (row["parts"]["function"] or [{"none": {"item": ["none"]}}])[0].items()
    gave = row["returns"][0]["value"] if row["returns"] else ""
    turns["function"] = [
        call("call", name=f" {name} ", arguments={"item": f" {want['item'][0]} "}),
        str(gave),
    ]
    sign, by = ("+" if "plus" in words else "-"), words[-1]
    turns["math"] = [call("calculator", expression=f" {found} {sign} {by} "), row["parts"]["math"]]
    return turns


def test_who_does_everything_right_is_paid_for_everything(plan):
    player = Player(plan)
    for row in rows_of(DATA / "eval.jsonl.gz")[:60]:
        lines = by_rule(row)

        def say(request, lines=lines):
            said = sum(message.role == "assistant" for message in request.messages)
            return lines[request.node][request.visit - 1 if request.node == "decide" else said]

        nodes = ("decide", "qa", "function", "math")
        state = player.start(row, EpisodeKey(0, "eval", 1, 0, "task", 0))
        [one] = play(player, [state], ScriptedEngine(dict.fromkeys(nodes, say)).generate)
        [scored] = score(plan, [one])
        assert one.outcome == "ok", one.detail
        spoken = {turn.role for turn in one.turns}
        wanted = {name: 1.5 if name == "master" else 1.0 for name in spoken}
        assert {(t.role, scored.totals[t.id]) for t in one.turns} == set(wanted.items()), row["question"]


def test_demonstrations_play_to_the_end_and_every_word_has_a_token(plan):
    tokenizer = make_wordpiece(Wordpiece(files=("vocab.jsonl",)), [DATA / "vocab.jsonl"])
    player = Player(plan)
    for number, demo in enumerate(rows_of(DATA / "demos.jsonl.gz")[:40]):
        one = player.demonstrate(demo, EpisodeKey(0, "warm_start", 1, number, f"demo{number}", 0))
        assert one.outcome == "ok", one.detail
        for turn in one.turns:
            text = "\n".join(message.content for message in turn.messages) + "\n" + turn.text
            ids = tokenizer(text)["input_ids"]
            assert len(ids) < 330 and tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text.lower()
