"""Rows: every file format gives the same rows, and a bad one is named by file, line and field."""

import gzip
import json
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from masflow.compiler import check, compile_experiment
from masflow.compiler.plan import SourceIR
from masflow.compiler.rows import load_tasks, read_rows
from masflow.errors import SpecError

WORKFLOW = """
name: tiny
task: {question: str, rank: int?, labels: {type: [str], from: answers}}
roles: {solver: {prompt: "Answer {{ question }}"}}
nodes: {solve: {role: solver}}
edges: [start -> solve -> end]
rewards: [{name: form, use: well_formed, level: turn}]
"""
ROWS = [
    {"question": "what", "rank": 1, "answers": ["a", "b"], "more": 0},
    {"question": "who", "rank": None, "answers": []},
]


@pytest.fixture
def plan_of(project):
    def compiled(data, **files):
        text = f"workflow: w.yaml\nmapping: {{models: {{p: {{roles: rest}}}}}}\nbase: a/b\ndata: {data}\n"
        return compile_experiment(project({"tiny.yaml": text, "w.yaml": WORKFLOW, **files}))

    return compiled


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_tasks_have_the_workflows_fields_under_its_names(plan_of):
    plan = plan_of("{train: rows.jsonl}", **{"rows.jsonl": lines(ROWS)})
    assert [t.row for t in load_tasks(plan, "train")] == [
        {"question": "what", "rank": 1, "labels": ["a", "b"]},
        {"question": "who", "rank": None, "labels": []},
    ]


def test_equal_rows_have_ids_of_their_own_and_ids_do_not_depend_on_order(plan_of):
    plan = plan_of(
        "{train: a.jsonl, eval: b.jsonl}", **{"a.jsonl": lines(ROWS * 2), "b.jsonl": lines(ROWS[::-1])}
    )
    ids = [t.id for t in load_tasks(plan, "train")]
    assert len(set(ids)) == 4
    assert {t.id for t in load_tasks(plan, "eval")} == set(ids[:2])


def test_json_lists_and_compressed_lines_give_the_rows_of_plain_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(ROWS))
    (tmp_path / "b.json").write_text(json.dumps(ROWS))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines(ROWS).encode()))
    (tmp_path / "d.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(ROWS).replace("\n", "\r\n\n").encode())
    for path in sorted(tmp_path.iterdir()):
        assert read_rows(SourceIR(str(path))) == ROWS, path.name


def test_parquet_gives_the_rows_of_plain_lines(tmp_path):
    pa: Any = import_module("pyarrow")
    parquet: Any = import_module("pyarrow.parquet")
    rows = [{"question": "what", "answers": ["a"]}, {"question": "who", "answers": []}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert read_rows(SourceIR(str(tmp_path / "rows.parquet"))) == rows


def saved(folder, rows, **splits):
    """Save as a user would: one data set, or several splits."""
    datasets: Any = import_module("datasets")
    datasets.disable_progress_bars()
    made = {name: datasets.Dataset.from_list(part) for name, part in {"train": rows, **splits}.items()}
    (datasets.DatasetDict(made) if splits else made["train"]).save_to_disk(folder)


SAVED = [{"question": "what", "rank": 1, "answers": ["a"]}, {"question": "who", "rank": None, "answers": []}]


def test_a_folder_saved_by_datasets_gives_its_rows_and_its_splits(project, plan_of, tmp_path):
    saved(tmp_path / "one", SAVED)
    saved(tmp_path / "two", SAVED[:1], dev=SAVED[1:])
    data = "{train: one, eval: {path: two, split: dev}, extra: {more: two}}"
    plan = plan_of(data)
    texts = {split: [task.row["question"] for task in load_tasks(plan, split)] for split in plan.data}
    assert texts == {"train": ["what", "who"], "eval": ["who"], "more": ["what"]}
    assert load_tasks(plan, "train")[0].row == {"question": "what", "rank": 1, "labels": ["a"]}


def test_a_saved_folder_is_checked_as_a_file_is(plan_of, tmp_path):
    saved(tmp_path / "bad", [{"question": "what", "rank": "first", "answers": ["a"]}])
    saved(tmp_path / "two", SAVED, dev=SAVED)
    saved(tmp_path / "torn", SAVED)
    (tmp_path / "torn" / "state.json").write_text("{")
    with pytest.raises(SpecError) as error:
        plan_of("{train: bad, eval: {path: two, split: dv}, extra: {torn: torn, one: {path: bad, split: x}}}")
    text = str(error.value)
    for words in ("rank", "unknown split 'dv'; known: dev, train", "'torn' can't be read", "has no splits"):
        assert words in text, text


def test_a_hub_id_is_loaded_through_datasets_and_its_rows_are_checked(plan_of, tmp_path, monkeypatch):
    datasets: Any = import_module("datasets")
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)  # datasets takes a folder of this name for the id, and asks nobody
    (tmp_path / "someone/questions").mkdir(parents=True)
    (tmp_path / "someone/questions/train.jsonl").write_text(lines(SAVED))
    assert read_rows(SourceIR("someone/questions", is_file=False)) == SAVED
    with pytest.raises(SpecError, match="can't be loaded"):
        read_rows(SourceIR("someone/questions", split="no_such_split", is_file=False))
    plan = plan_of("{train: rows.jsonl}", **{"rows.jsonl": lines(ROWS)})
    hub = replace(plan, data={"train": (SourceIR("someone/questions", is_file=False),)})
    assert [task.row["question"] for task in load_tasks(hub, "train")] == ["what", "who"]
    bad = [{"query": "what", "rank": 1, "answers": ["a"]}]
    (tmp_path / "someone/unfit").mkdir()
    (tmp_path / "someone/unfit/train.jsonl").write_text(lines(bad))
    with pytest.raises(SpecError, match="the row misses 'question'"):
        load_tasks(replace(plan, data={"train": (SourceIR("someone/unfit", is_file=False),)}), "train")


def test_cells_of_a_table_take_the_types_of_their_fields(project):
    workflow = WORKFLOW.replace("labels: {type: [str], from: answers}", "share: float, done: bool")
    text = "workflow: w.yaml\nmapping: {models: {p: {roles: rest}}}\nbase: a/b\ndata: {train: rows.csv}\n"
    table = 'question,rank,share,done\nwhat,3,0.5,true\n"who, then",,1,False\n'
    plan = compile_experiment(project({"tiny.yaml": text, "w.yaml": workflow, "rows.csv": table}))
    assert [t.row for t in load_tasks(plan, "train")] == [
        {"question": "what", "rank": 3, "share": 0.5, "done": True},
        {"question": "who, then", "rank": None, "share": 1.0, "done": False},
    ]


def test_a_mixtures_rows_stand_once_each_with_their_source(plan_of):
    data = "{train: [{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 0.5, name: more}]}"
    plan = plan_of(data, **{"a.jsonl": lines(ROWS[:1]), "b.jsonl": lines(ROWS)})
    found = [(t.row["question"], t.source) for t in load_tasks(plan, "train")]
    assert found == [("what", 0), ("what", 1), ("who", 1)]
    assert len({t.id for t in load_tasks(plan, "train")}) == 3
    assert [(s.name, s.weight) for s in plan.data["train"]] == [("a", 2), ("more", 0.5)]


def test_sources_of_one_name_are_told_apart(plan_of):
    text = {name: lines(ROWS) for name in ("a/rows.jsonl", "b/rows.jsonl", "c/rows.jsonl")}
    plan = plan_of(f"{{train: [{', '.join(text)}]}}", **text)
    assert [s.name for s in plan.data["train"]] == ["rows", "rows_2", "rows_3"]
    renamed = plan_of("{train: [{path: a/rows.jsonl, name: x}, b/rows.jsonl, c/rows.jsonl]}", **text)
    assert renamed.digest == plan.digest
    shared = (
        "{path: a/rows.jsonl, weight: 1}, {path: b/rows.jsonl, weight: 1}, {path: c/rows.jsonl, weight: 1}"
    )
    assert plan_of(f"{{train: [{shared}]}}", **text).digest != plan.digest


def test_a_compressed_source_takes_part_in_a_mixture_under_its_name(plan_of, tmp_path):
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines(ROWS).encode()))
    data = "{train: [{path: a.jsonl, weight: 1}, {path: packed.jsonl.gz, weight: 3}]}"
    plan = plan_of(data, **{"a.jsonl": lines(ROWS)})
    assert [s.name for s in plan.data["train"]] == ["a", "packed"]
    assert [t.source for t in load_tasks(plan, "train")] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ("{train: [{path: a.jsonl, weight: 2}, b.jsonl]}", "mixed-weights"),
        ("{train: {path: a.jsonl, weight: 2}}", "option-without-effect"),
        ("{eval: [{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 1}]}", "option-without-effect"),
    ],
)
def test_a_weight_that_shares_nothing_is_refused(plan_of, data, code):
    with pytest.raises(SpecError) as caught:
        plan_of(data, **{"a.jsonl": lines(ROWS), "b.jsonl": lines(ROWS)})
    assert [p.code for p in caught.value.problems if not p.code.startswith("warn-")] == [code]


@pytest.mark.parametrize(
    ("text", "code", "line", "field"),
    [
        (lines(ROWS) + '{"question": 3, "answers": []}\n', "wrong-field-type", 3, "question"),
        (lines(ROWS) + '\n{"question": "why", "answers": ["a", 2]}\n', "wrong-field-type", 4, "answers"),
        ('{"question": "why"}\n', "missing-field", 1, "answers"),
        ('{"question": "why", "answers": null}\n', "wrong-field-type", 1, "answers"),
        ("{question: why}\n", "bad-row", 1, ""),
        ('{"question": NaN}\n', "bad-row", 1, ""),
        ("[" * 100_000, "bad-row", 1, ""),
        ("3\n", "bad-row", 1, ""),
        ("", "empty-data", 0, ""),
    ],
    ids=["type", "item", "missing", "null", "not json", "nan", "deep", "number", "empty"],
)
def test_a_bad_row_is_named_by_file_line_and_field(plan_of, text, code, line, field):
    with pytest.raises(SpecError) as caught:
        plan_of("{train: rows.jsonl}", **{"rows.jsonl": text})
    found = caught.value.problems[0]
    assert (found.code, found.line, found.path) == (code, line, field)
    assert found.file.endswith("rows.jsonl")


def test_bytes_that_are_no_text_are_refused(plan_of, tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="save it as UTF-8"):
        plan_of("{train: bad.jsonl}")


def test_an_unknown_split_names_the_known_ones(plan_of):
    plan = plan_of("{train: rows.jsonl, extra: {probe: rows.jsonl}}", **{"rows.jsonl": lines(ROWS)})
    with pytest.raises(SpecError, match="known: probe, train"):
        load_tasks(plan, "prob")


@pytest.mark.parametrize(
    ("value", "reason"),
    [('"\\ud800"', "half a character"), ("1e999", "isn't finite")],
    ids=["half", "endless"],
)
def test_a_value_that_can_not_be_written_again_is_a_problem_of_its_row(project, value, reason):
    workflow = WORKFLOW.replace("rank: int?", "rank: any")
    text = "workflow: w.yaml\nmapping: {models: {p: {roles: rest}}}\nbase: a/b\ndata: {train: r.jsonl}\n"
    row = f'{{"question": "q", "rank": {value}, "answers": [], "unused": {value}}}\n'
    path = project({"tiny.yaml": text, "w.yaml": workflow, "r.jsonl": row})
    [problem] = check(path)
    assert (problem.code, problem.line, problem.path) == ("bad-row", 1, "rank")
    assert reason in problem.message


HEADER = "question,rank,answers\n"


@pytest.mark.parametrize(
    ("name", "content", "line", "reason"),
    [
        ("a.csv", HEADER + "x,1,[],more\n", 2, "more cells"),
        ("a.csv", "question,rank,rank,answers\nx,1,2,[]\n", 1, "'rank' stands twice"),
        ("a.csv", HEADER + "x,1_0,[]\n", 2, "expected int?"),
        ("a.csv", HEADER + "x" * 11_000_000 + ",1,[]\n", 2, "field larger"),
        ("a.parquet", "PAR1 is not all of it", 0, "can't be read"),
        ("a.jsonl.gz", "no gzip", 0, "can't be read"),
    ],
    ids=["cells", "columns", "underscore", "huge", "parquet", "gzip"],
)
def test_a_table_or_file_that_is_not_one_is_a_problem_with_its_line(project, name, content, line, reason):
    text = (
        f"workflow: w.yaml\nmapping: {{models: {{p: {{roles: rest}}}}}}\nbase: a/b\ndata: {{train: {name}}}\n"
    )
    [problem] = check(project({"tiny.yaml": text, "w.yaml": WORKFLOW, name: content}))
    assert problem.line == line
    assert reason in problem.message


def test_long_cells_are_read(plan_of):
    long = "x" * 200_000
    plan = plan_of("{train: a.csv}", **{"a.csv": HEADER + long + ",1,[]\r\n"})
    assert load_tasks(plan, "train")[0].row["question"] == long


def test_a_damaged_archive_is_a_problem(project):
    packed = bytearray(gzip.compress(lines(ROWS * 50).encode()))
    packed[40:60] = bytes(20)
    text = "workflow: w.yaml\nmapping: {models: {p: {roles: rest}}}\nbase: a/b\ndata: {train: a.jsonl.gz}\n"
    path = project({"tiny.yaml": text, "w.yaml": WORKFLOW})
    (path.parent / "a.jsonl.gz").write_bytes(packed)
    [problem] = check(path)
    assert problem.code == "unreadable-data"
