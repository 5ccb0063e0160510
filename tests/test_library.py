"""The shipped content can be listed and copied out, and nothing of the user's is overwritten."""

from pathlib import Path

import pytest

from masflow.errors import SpecError
from masflow.library import FOLDERS, copy_library, library_root, list_content
from masflow.project import load


def test_everything_that_a_user_may_name_is_listed_with_its_summary():
    found = {item.path: item for item in list_content(library_root())}
    quickstart = found["workflows/quickstart.yaml"]
    assert (quickstart.kind, quickstart.name) == ("workflow", "quickstart") and "search" in quickstart.summary
    assert found["rewards/qa.py"].kind == "reward" and found["rewards/qa.py"].summary
    assert {item.kind for item in found.values()} == set(FOLDERS)


def test_a_projects_own_content_comes_before_the_librarys(tmp_path):
    (tmp_path / "workflows" / "mine").mkdir(parents=True)
    (tmp_path / "workflows" / "mine.yaml").write_text("name: mine\nsummary: My own.\n")
    (tmp_path / "workflows" / "mine" / "prompt.md").touch()
    (tmp_path / "mappings").mkdir()
    (tmp_path / "mappings" / "broken.yaml").write_text("a: [")
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "broken.py").write_text("def (")
    (tmp_path / "rewards" / "odd.py").write_bytes(b"\xff\x00")
    found = list_content(tmp_path)
    own = [item.path for item in found if not item.path.startswith("lib:")]
    assert own == ["workflows/mine.yaml", "rewards/broken.py", "rewards/odd.py", "mappings/broken.yaml"]
    assert found[0].summary == "My own." and found[0].to_dict()["path"] == "workflows/mine.yaml"
    assert "lib:workflows/quickstart.yaml" in {item.path for item in found}


def test_the_copy_is_complete_and_loads_and_a_second_copy_writes_nothing(tmp_path):
    folder = tmp_path / "new" / "project"
    written = copy_library(folder)
    assert Path("examples/quickstart/corpus.jsonl") in written
    assert load(folder / "workflows" / "quickstart.yaml").root == folder
    assert not [p for p in written if "__pycache__" in p.parts or p.name.startswith(".")]
    for path in written:
        assert (folder / path).read_bytes() == (library_root() / path).read_bytes()
    assert copy_library(folder) == []


def test_a_file_of_the_user_stops_the_copy_before_anything_is_written(tmp_path):
    (tmp_path / "mappings").mkdir()
    mine = tmp_path / "mappings" / "shared.yaml"
    mine.write_text("mine")
    with pytest.raises(SpecError) as caught:
        copy_library(tmp_path)
    assert [p.code for p in caught.value.problems] == ["file-exists"]
    assert mine.read_text() == "mine" and not (tmp_path / "workflows").exists()


def test_a_file_in_the_folders_place_is_a_problem(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(SpecError, match="not a folder"):
        copy_library(tmp_path / "x")
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "mappings").touch()
    with pytest.raises(SpecError):
        copy_library(tmp_path / "y")
