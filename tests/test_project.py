"""Documents and places: roots, references, data variables, kinds of documents."""

import os
from pathlib import Path

import pytest

from masflow.errors import SpecError, Where
from masflow.project import Source, expand_data, find_documents, find_root, load, load_data, resolve

PLACE = Where("w.yaml", 3, "roles.a.prompt")
WORKFLOW = 'name: w\nroles: {r: {prompt: "say x"}}\nnodes: {a: {role: r}}\nedges: [start -> a -> end]\n'


def code_of(caught) -> str:
    (problem,) = caught.value.problems
    assert (problem.file, problem.line) == ("w.yaml", 3) and problem.fix
    return problem.code


@pytest.mark.parametrize("sign", ["workflows", ".git", "pyproject.toml"])
def test_the_root_is_the_nearest_parent_with_a_sign(tmp_path, sign):
    inner = tmp_path / "p" / "workflows_of_mine" / "deep"
    inner.mkdir(parents=True)
    (tmp_path / "p" / sign).mkdir()
    assert find_root(inner / "w.yaml") == tmp_path / "p"
    assert find_root(inner) == tmp_path / "p"


def test_without_a_sign_the_root_is_the_files_folder(tmp_path):
    assert find_root(tmp_path / "w.yaml") == tmp_path


def test_a_reference_is_tried_beside_the_file_and_then_at_the_root(tmp_path):
    (tmp_path / "workflows").mkdir()
    (tmp_path / "workflows" / "a.md").touch()
    (tmp_path / "b.md").touch()
    file = tmp_path / "workflows" / "w.yaml"
    assert resolve("a.md", file, tmp_path, PLACE) == tmp_path / "workflows" / "a.md"
    assert resolve("b.md", file, tmp_path, PLACE) == tmp_path / "b.md"
    assert resolve("workflows/a.md", file, tmp_path, PLACE) == tmp_path / "workflows" / "a.md"
    assert resolve("../b.md", file, tmp_path, PLACE) == tmp_path / "b.md"
    assert resolve(str(tmp_path / "b.md"), file, tmp_path, PLACE) == tmp_path / "b.md"
    assert resolve("b.md", tmp_path / "workflows", tmp_path, PLACE) == tmp_path / "b.md"
    assert resolve("b.md", None, tmp_path, PLACE) == tmp_path / "b.md"


def test_a_reference_at_both_places_is_refused(tmp_path):
    (tmp_path / "workflows").mkdir()
    (tmp_path / "workflows" / "a.md").touch()
    (tmp_path / "a.md").touch()
    with pytest.raises(SpecError, match="exists twice") as caught:
        resolve("a.md", tmp_path / "workflows" / "w.yaml", tmp_path, PLACE)
    assert code_of(caught) == "ambiguous-path"


def test_the_same_file_by_both_ways_is_one_file(tmp_path):
    (tmp_path / "a.md").touch()
    assert resolve("a.md", tmp_path / "w.yaml", tmp_path, PLACE) == tmp_path / "a.md"


def test_a_missing_reference_names_the_nearest_file(tmp_path):
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "planner.md").touch()
    with pytest.raises(SpecError, match=r"write 'prompts/planner.md'") as caught:
        resolve("prompts/planer.md", tmp_path / "w.yaml", tmp_path, PLACE, "prompt")
    assert code_of(caught) == "missing-file"


@pytest.mark.parametrize(
    "ref", ["a\0b", "x" * 5000, "", "~nobody/x", "a\nb", "/" * 300, ".", "lib:", "lib:../../etc/passwd"]
)
def test_odd_references_are_problems_or_paths_never_other_errors(tmp_path, ref):
    try:
        assert resolve(ref, tmp_path / "w.yaml", tmp_path, PLACE).exists()
    except SpecError as error:
        assert error.problems[0].fix


def test_the_library_is_searched_by_kind_by_path_and_by_name(tmp_path):
    for ref, what in (
        ("lib:shared", "mapping"),
        ("lib:mappings/shared.yaml", "file"),
        ("lib:shared", "file"),
    ):
        found = resolve(ref, None, tmp_path, PLACE, what)
        assert found.name == "shared.yaml" and found.parent.name == "mappings"
    with pytest.raises(SpecError, match="write 'lib:shared'"):
        resolve("lib:shard", None, tmp_path, PLACE, "mapping")
    with pytest.raises(SpecError, match=r"may be examples/quickstart.yaml, workflows/quickstart.yaml"):
        resolve("lib:quickstart", None, tmp_path, PLACE)
    assert resolve("lib:quickstart", None, tmp_path, PLACE, "workflow").parent.name == "workflows"


def test_variables_expand_in_data_paths(tmp_path, monkeypatch):
    monkeypatch.delenv("MASFLOW_DATA", raising=False)
    assert expand_data("${MASFLOW_DATA}/a", tmp_path, PLACE) == f"{tmp_path.parent}/shared/data/a"
    monkeypatch.setenv("MASFLOW_DATA", "/d")
    monkeypatch.setenv("WHERE", "w")
    assert expand_data("${MASFLOW_DATA}/${WHERE}/$WHERE", tmp_path, PLACE) == "/d/w/$WHERE"
    monkeypatch.delenv("WHERE")
    with pytest.raises(SpecError, match="'WHERE' of"):
        expand_data("${WHERE}", tmp_path, PLACE)


def test_a_source_gives_the_line_of_the_nearest_known_ancestor():
    source = Source("w.yaml", {(): 1, ("nodes",): 4, ("nodes", "a"): 6})
    assert source.where("nodes", "a", "role") == Where("w.yaml", 6, "nodes.a.role")
    assert source.where("edges", 2) == Where("w.yaml", 1, "edges.2")
    assert source.under("nodes").where("a", "x") == Where("w.yaml", 6, "a.x")
    assert source.under("nodes", "b").where() == Where("w.yaml", 4, "")


def test_every_value_of_a_document_has_its_line(tmp_path):
    path = tmp_path / "w.yaml"
    path.write_text(
        WORKFLOW.replace("edges: [start -> a -> end]", "edges:\n\n  - start -> a\n  # on\n  - a -> end")
    )
    source = load(path).source
    assert [source.where("edges", i).line for i in (0, 1)] == [6, 8]
    assert source.where("roles", "r", "prompt").line == 2


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (WORKFLOW, "workflow"),
        ("models: {m: {roles: rest}}\n", "mapping"),
        ("backend: local\n", "runtime"),
        ("workflow: w.yaml\nmapping: m.yaml\n", "experiment"),
    ],
)
def test_the_kind_of_a_document_is_told_by_its_keys(tmp_path, text, kind):
    path = tmp_path / "d.yaml"
    path.write_text(text)
    assert load(path).kind == kind
    assert load(path, kind).root == tmp_path


def test_a_document_of_another_kind_is_refused_where_one_is_needed(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text("models: {m: {roles: rest}}\n")
    with pytest.raises(SpecError, match="this is a mapping document; a workflow belongs here"):
        load(path, "workflow")
    with pytest.raises(SpecError, match="missing key 'nodes'"):
        load_data({"name": "w"}, Source("w.yaml"), "workflow", tmp_path)


def test_missing_folders_unreadable_and_huge_files_are_problems(tmp_path):
    (tmp_path / "w.yaml").write_text(WORKFLOW)
    with pytest.raises(SpecError, match=r"write .*w\.yaml"):
        load(tmp_path / "w.yml")
    with pytest.raises(SpecError, match="is a folder"):
        load(tmp_path)
    big = tmp_path / "big.yaml"
    with big.open("wb") as file:
        file.truncate(9_000_000)
    with pytest.raises(SpecError, match="8,000,000 bytes"):
        load(big)
    if hasattr(os, "mkfifo") and os.geteuid() != 0:
        big.chmod(0)
        with pytest.raises(SpecError):
            load(big)


def test_a_folder_gives_its_documents_in_order(tmp_path):
    for name in ("b.yaml", "a.yml", "c.txt"):
        (tmp_path / name).touch()
    assert [p.name for p in find_documents(tmp_path)] == ["a.yml", "b.yaml"]
    assert list(find_documents(Path("x.yaml"))) == [Path("x.yaml")]


def test_what_is_no_ordinary_file_is_a_problem_and_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "link.yaml").symlink_to("nowhere.yaml")
    with pytest.raises(SpecError, match="no ordinary file"):
        load(tmp_path / "pipe.yaml")
    with pytest.raises(SpecError, match=r"a link to 'nowhere\.yaml', which doesn't exist"):
        load(tmp_path / "link.yaml")


def test_a_workflow_where_an_experiment_belongs_says_what_an_experiment_is(tmp_path: Path):
    (tmp_path / "w.yaml").write_text("name: x\nnodes: {}\nedges: []\n")
    with pytest.raises(SpecError, match="mapping, base and data together"):
        load(tmp_path / "w.yaml", "experiment")


def test_a_document_that_the_disk_refuses_is_told_by_name(tmp_path):
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    for path in (tmp_path / "loop.yaml", tmp_path / f"{'x' * 300}.yaml"):
        with pytest.raises(SpecError) as caught:
            load(path)
        (problem,) = caught.value.problems
        assert (problem.code, problem.fix) == ("unreadable", "check the name and its permissions")
        assert path.name in problem.message
