"""The quickstart's files are what its generator writes, and its splits are apart as their kinds say."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "examples" / "quickstart"
HELD_OUT = ["select", "eval"]


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def held_out(split: str) -> list[dict]:
    known, novel = rows(split), rows(f"{split}_novel")
    assert {t["kind"] for t in novel} == {"novel"} and "novel" not in {t["kind"] for t in known}
    return known + novel


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("quickstart_generate", DATA / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def facts(generate):
    relations = json.loads((DATA / "relations.json").read_text())
    return {f.id: f for f in generate.read_facts(relations)}


def test_generator_writes_the_files_that_stand_here_byte_for_byte(generate, tmp_path):
    generate.main(tmp_path)
    written = sorted(p.name for p in tmp_path.iterdir())
    assert written == sorted(p.name for p in DATA.glob("*.jsonl"))
    assert [n for n in written if (tmp_path / n).read_bytes() != (DATA / n).read_bytes()] == []


def test_there_are_well_over_a_thousand_facts_and_each_is_one_plain_sentence(facts):
    corpus = rows("corpus")
    assert len(corpus) > 1500
    assert len({r["id"] for r in corpus}) == len({r["text"] for r in corpus}) == len(corpus)
    assert [r["text"] for r in corpus if not re.fullmatch(r"[a-z0-9]+( [a-z0-9]+)*", r["text"])] == []
    assert len({(f.entity, f.relation) for f in facts.values()}) == len(facts)


@pytest.mark.parametrize("name", ["train", "select", "eval", "twohop_train", "twohop_select", "twohop_eval"])
def test_gold_passage_holds_the_answer(name):
    text_of = {r["id"]: f" {r['text']} " for r in rows("corpus")}
    for task in rows(name):
        last = task["gold"][-1] if isinstance(task["gold"], list) else task["gold"]
        assert all(f" {answer} " in text_of[last] for answer in task["answers"]), task


def test_no_table_gives_two_answers_to_one_question():
    answers: dict[str, list[str]] = {}
    for name in ("train", "select", "eval"):
        for task in rows(name):
            assert answers.setdefault(task["question"], task["answers"]) == task["answers"]


@pytest.mark.parametrize("split", HELD_OUT)
def test_kinds_hold_out_what_they_say(split, facts):
    train = rows("train")
    other = held_out(next(s for s in HELD_OUT if s != split))
    pairs = {facts[t["gold"]].entity + "/" + facts[t["gold"]].relation for t in train}
    entities = {facts[t["gold"]].entity for t in train}
    wording = {template(t, facts) for t in train}
    by_kind: dict[str, list[dict]] = {}
    for task in held_out(split):
        by_kind.setdefault(task["kind"], []).append(task)
    assert {kind: len(tasks) for kind, tasks in by_kind.items()} == dict.fromkeys(
        ("pair", "entity", "template", "novel"), 100
    )
    for task in by_kind["pair"]:
        fact = facts[task["gold"]]
        assert fact.entity in entities and f"{fact.entity}/{fact.relation}" not in pairs
    for kind in ("entity", "novel"):
        mine = {facts[t["gold"]].entity for t in by_kind[kind]}
        assert not mine & entities
        assert not mine & {facts[t["gold"]].entity for t in other}
    for task in by_kind["template"]:
        fact = facts[task["gold"]]
        assert f"{fact.entity}/{fact.relation}" in pairs and template(task, facts) not in wording
    assert not {t["question"] for t in other} & {t["question"] for t in held_out(split)}
    mine = {(facts[t["gold"]].entity, facts[t["gold"]].relation) for t in by_kind["pair"]}
    assert not mine & {
        (facts[t["gold"]].entity, facts[t["gold"]].relation) for t in other if t["kind"] == "pair"
    }


def template(task: dict, facts: dict) -> str:
    fact = facts[task["gold"]]
    return fact.relation + ":" + f" {task['question']} ".replace(f" {fact.entity} ", " {e} ").strip()


def test_vocabulary_lacks_exactly_the_words_of_novel_entities(facts):
    vocab = {w for r in rows("vocab") for w in r["text"].split()}
    for split in HELD_OUT:
        for task in held_out(split):
            fact = facts[task["gold"]]
            known = fact.entity in vocab if task["kind"] == "novel" else False
            assert not known, task
            if task["kind"] == "entity":
                assert set(task["question"].split()) <= vocab, task
    wording = {
        w for s in HELD_OUT for t in held_out(s) if t["kind"] == "template" for w in t["question"].split()
    }
    names = {w for f in facts.values() for w in f.entity.split()}
    assert wording - names <= vocab


def held_questions() -> set[str]:
    return {t["question"] for s in HELD_OUT for t in held_out(s) + rows(f"twohop_{s}")}


def test_clean_and_sloppy_demonstrations_have_equal_budget_and_no_held_out_task():
    sloppy, clean = rows("demos"), rows("demos_clean")
    assert [d["task"] for d in sloppy] == [d["task"] for d in clean]
    assert not held_questions() & {d["task"]["question"] for d in sloppy}
    for demo in clean:
        *_, found, answer = demo["turns"]
        assert f" {answer['reply']} " in f" {found['value']['text']} "
    pairs = zip(sloppy, clean, strict=True)
    right = sum(a["turns"][-1]["reply"] == b["turns"][-1]["reply"] for a, b in pairs) / len(sloppy)
    assert 0.35 < right < 0.45
    assert all([t["node"] for t in d["turns"]] == ["plan", "find", "answer"] for d in sloppy + clean)


def test_two_hop_demonstrations_hold_together_and_are_about_another_entity(facts):
    held = held_questions()
    trained = {facts[t["gold"]].entity for t in rows("train")}
    seen: dict[str, int] = {}
    full = {"plan": 0, "refine": 0}
    demos = rows("twohop_demos")
    for demo in demos:
        question = demo["task"]["question"]
        assert question not in held
        seen[question] = seen.get(question, 0) + 1
        turns = {t["node"]: t.get("reply") or t["value"]["text"] for t in demo["turns"]}
        assert list(turns) == ["plan", "find", "refine", "find_more", "answer"]
        bridge, asked = (facts[i] for i in demo["task"]["gold"])
        first, second = f" {turns['find']} ", f" {turns['find_more']} "
        assert f" {bridge.answer} " in first and f" {bridge.relation} " in first
        others = {e for e in trained - {bridge.entity} if f" {e} " in first and f" {e} " in second}
        assert others and f" {asked.relation} " in second
        assert turns["plan"] in about(bridge.relation, {bridge.answer})
        assert turns["refine"] in about(asked.relation, others)
        said = turns["answer"].removeprefix("it is ")
        assert f" {said} " in second
        full["plan"] += turns["plan"] == f"{bridge.relation} {bridge.answer}"
        full["refine"] += turns["refine"] in {f"{asked.relation} {e}" for e in others}
    assert set(seen.values()) == {2} and len(seen) == len(rows("twohop_train"))
    assert all(0.35 < count / len(demos) < 0.45 for count in full.values())


def about(relation: str, names: set[str]) -> set[str]:
    return {relation, *names, *(f"{relation} {name}" for name in names)}


def test_two_hop_tasks_share_no_entity_between_splits(facts):
    mine = {s: {facts[t["gold"][0]].entity for t in rows(f"twohop_{s}")} for s in ("train", *HELD_OUT)}
    assert not mine["select"] & mine["train"] and not mine["eval"] & mine["train"]
    assert not mine["select"] & mine["eval"]


def test_two_hop_bridge_names_one_entity(facts):
    for split in ("train", *HELD_OUT):
        for task in rows(f"twohop_{split}"):
            bridge, asked = (facts[i] for i in task["gold"])
            assert (bridge.table, bridge.entity) == (asked.table, asked.entity)
            same = [f for f in facts.values() if (f.relation, f.answer) == (bridge.relation, bridge.answer)]
            assert {f.entity for f in same if f.table == bridge.table} == {bridge.entity}
