"""The command line as other programs see it: exit codes, JSON, and what is never imported."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from masflow.cli import main

Toy = Callable[..., Path]
Masflow = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[1]


@pytest.fixture
def masflow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Masflow:
    """`masflow("eval", …)` runs the program in this process: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["masflow", *map(str, words)])
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        return int(code), out, err

    return run


def last_json(text: str) -> Any:
    return json.loads(text.strip().splitlines()[-1])


def test_check_says_every_problem_and_exits_1(toy: Toy, masflow: Masflow):
    bad = toy(workflow=(("edges: [start -> call -> echo -> end]", "edges: [start -> cal -> echo -> ende]"),))
    code, out, _ = masflow("check", bad, "--json")
    found = last_json(out)
    assert code == 1
    assert found["files"] == 1
    assert len(found["problems"]) >= 2
    assert set(found["problems"][0]) == {"code", "file", "line", "path", "message", "fix"}
    code, out, _ = masflow("check", bad)
    assert code == 1
    assert "'cal'" in out and "'ende'" in out and "Traceback" not in out


def test_check_of_a_good_experiment_exits_0(toy: Toy, masflow: Masflow):
    code, out, _ = masflow("check", toy(), "--json")
    assert (code, last_json(out)) == (0, {"files": 1, "problems": []})


def test_check_imports_neither_torch_nor_ray(toy: Toy):
    script = (
        "import sys\nsys.argv = ['masflow', 'check', sys.argv[1]]\nfrom masflow.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'ray', 'transformers', 'peft', 'matplotlib', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(toy())], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr + done.stdout


def test_wrong_words_exit_2(toy: Toy, masflow: Masflow):
    assert masflow("train", toy(), "--set", "train.steps")[0] == 2
    assert masflow("train")[0] == 2
    assert masflow("no-such-command")[0] == 2


def test_a_wrong_file_exits_1_without_a_traceback(masflow: Masflow):
    code, _, err = masflow("train", "nothing.yaml")
    assert code == 1
    assert "nothing.yaml" in err and "Traceback" not in err


def test_train_ends_with_before_and_after_of_the_team_and_of_each_role(toy: Toy, masflow: Masflow):
    code, out, err = masflow("train", toy(), "--out", "run", "--set", "train.steps=2")
    assert code == 0, err
    for words in (
        "team echoed, greedy",
        "team echoed, sampled",
        "caller called",
        "curves.png",
        "before",
        "after",
    ):
        assert words in out, words
    assert Path("run/curves.svg").stat().st_size > 1000
    assert "steps: 2" in Path("run/experiment.yaml").read_text()
    code, _, err = masflow("train", toy(), "--out", "run", "--set", "train.steps=2")
    assert (code, "--resume" in err) == (3, True)
    code, _, err = masflow("train", toy(), "--out", "run", "--set", "train.steps=2", "--resume")
    assert (code, "2 of 2 steps" in err) == (3, True)


def test_the_commands_that_a_run_prints_work_on_it(toy: Toy, masflow: Masflow):
    path = toy()
    Path("own.yaml").write_text("models: {own: {roles: rest, per: role}}\n")
    words = ("--mapping", "own.yaml", "--set", "train.steps=1", "--set", "base.config.hidden_size=8")
    code, out, err = masflow("train", path, "--out", "run", *words)
    assert code == 0, err
    printed = [line.split(" masflow ")[1].split() for line in out.splitlines() if " masflow " in line]
    assert [command[0] for command in printed] == ["run", "eval", "export"]
    for command in printed:
        code, _, err = masflow(*command)
        assert code == 0, (command, err)


def test_train_json_gives_its_result_on_the_last_line(toy: Toy, masflow: Masflow):
    code, out, _ = masflow("train", toy(), "--out", "run", "--set", "train.steps=1", "--json")
    found = last_json(out)
    assert code == 0
    assert set(found) == {"steps", "eval_before", "eval_after", "out"}
    assert found["steps"] == 1


def test_several_seeds_have_a_folder_each_and_those_done_are_not_done_again(toy: Toy, masflow: Masflow):
    words = ("train", toy(), "--out", "run", "--set", "train.steps=1", "--seeds", "2", "--json")
    code, out, _ = masflow(*words)
    found = last_json(out)
    assert code == 0
    assert len(found["eval_after"]["seeds"]) == 2
    before = Path("run/seed_1/metrics.jsonl").stat().st_mtime_ns
    code, out, _ = masflow(*words, "--resume")
    assert (code, last_json(out)) == (0, found)
    assert Path("run/seed_1/metrics.jsonl").stat().st_mtime_ns == before
    code, out, _ = masflow(*words[:-1], "--resume")
    after = found["eval_after"]
    assert code == 0 and "held out before: " in out and f"held out after:  {after['mean']:.3f} ± " in out
    assert f"95 % interval {after['low']:.3f} to {after['high']:.3f}" in out
    assert json.loads(Path("run/seeds.json").read_text()) == found
    assert Path("run/curves.png").stat().st_size > 10_000


def test_sft_is_the_warm_start_alone_and_train_goes_on_from_it(toy: Toy, masflow: Masflow):
    code, out, _ = masflow("sft", toy(), "--out", "run", "--json")
    found = last_json(out)
    assert (code, found["steps"], found["eval_after"]) == (0, 0, None)
    assert found["eval_before"]["episodes"] == 3
    assert masflow("sft", toy(), "--out", "run", "--resume")[0] == 3
    code, out, _ = masflow("train", toy(), "--out", "run", "--resume", "--json")
    assert (code, last_json(out)["steps"]) == (0, 4)


def test_what_check_warns_of_is_said_when_a_run_starts(toy: Toy, masflow: Masflow):
    old = 'otherwise: 0,\n     args: {said: "{{ echo.text }}"'
    path = toy(workflow=((old, old.removeprefix("otherwise: 0,")),))
    code, _, err = masflow("sft", path, "--out", "run")
    assert code == 0
    assert "warning: " in err and "otherwise" in err


def test_eval_scores_bare_models_or_a_checkpoint_and_leaves_the_run_alone(toy: Toy, masflow: Masflow):
    assert masflow("train", toy(), "--out", "run", "--set", "train.seed=3")[0] == 0
    files = {p: p.stat().st_mtime_ns for p in Path("run").rglob("*") if p.is_file()}
    code, out, err = masflow("eval", toy(), "--checkpoint", "run@2", "--samples", "2", "--json")
    assert code == 0, err
    found = last_json(out)
    assert {"episodes", "metrics", "outcomes", "roles"} <= set(found)
    assert set(found["roles"]) == {"caller", "echoer"}
    assert found["sampled"]["low"] <= found["sampled"]["mean"] <= found["sampled"]["high"]
    assert {p: p.stat().st_mtime_ns for p in Path("run").rglob("*") if p.is_file()} == files
    code, out, _ = masflow("eval", toy(), "--limit", "2")
    assert (code, "2 tasks" in out) == (0, True)


def test_eval_of_a_step_that_is_not_kept_or_an_unknown_split_says_what_there_is(toy: Toy, masflow: Masflow):
    assert masflow("train", toy(), "--out", "run", "--set", "train.steps=1")[0] == 0
    code, _, err = masflow("eval", toy(), "--checkpoint", "run@7")
    assert (code, "step_000001" in err) == (3, True)
    code, _, err = masflow("eval", toy(), "--split", "evil")
    assert (code, "known: train, eval" in err) == (3, True)


def test_run_plays_one_episode_readably(toy: Toy, masflow: Masflow):
    code, out, err = masflow("run", toy(), "--task", '{"word": "red"}')
    assert code == 0, err
    assert "say red" in out and "outcome: " in out and "unscored: the task leaves out answer" in out
    code, out, _ = masflow("run", toy(), "--task", '{"word": "red", "answer": "red"}', "--json")
    found = last_json(out)
    assert code == 0
    assert found["turns"][0]["node"] == "call"
    code, _, err = masflow("run", toy(), "--task", '{"wrd": "red"}')
    assert (code, "word" in err) == (1, True)


def test_a_person_is_asked_and_a_paused_episode_goes_on_later(
    toy: Toy, masflow: Masflow, monkeypatch: pytest.MonkeyPatch
):
    human = 'echo: {human: {ask: "Is {{ call.text }} right?", in_training: {value: {text: "yes"}}}}'
    experiment = toy(workflow=(("echo: {role: echoer}", human), ("  echoer: {prompt", "  spare: {prompt")))
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, out, err = masflow("run", experiment, "--task", '{"word": "red", "answer": "red"}', "--json")
    paused = last_json(out)
    assert (code, paused["outcome"]) == (0, "paused"), err
    assert f"--resume {paused['id']}" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("red\n"))
    code, out, err = masflow("run", experiment, "--resume", paused["id"], "--json")
    found = last_json(out)
    assert (code, found["outcome"], found["output"]) == (0, "ok", {"said": "red"}), err
    assert found["turns"][0]["text"] == paused["turns"][0]["text"]
    assert masflow("run", experiment, "--resume", paused["id"])[0] == 3


def test_what_users_functions_print_stays_out_of_the_json(toy: Toy, masflow: Masflow):
    experiment = toy()
    reward = experiment.parent / "echo.py"
    reward.write_text(reward.read_text().replace("    return", "    print('HELLO')\n    return"))
    for words in (("run", experiment, "--json"), ("eval", experiment, "--limit", 1, "--json")):
        code, out, err = masflow(*words)
        assert code == 0, err
        assert isinstance(json.loads(out), dict)
        assert "HELLO" in err


def test_a_folder_that_can_not_be_written_is_said(toy: Toy, masflow: Masflow, monkeypatch, tmp_path: Path):
    human = 'echo: {human: {ask: "Is {{ call.text }} right?", in_training: {value: {text: "yes"}}}}'
    experiment = toy(workflow=(("echo: {role: echoer}", human), ("  echoer: {prompt", "  spare: {prompt")))
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, _, err = masflow("run", experiment, "--out", tmp_path / "file" / "episodes")
    assert (code, "file" in err, "Traceback" in err) == (3, True, False)


def test_ls_and_init_give_the_library(masflow: Masflow, tmp_path: Path):
    code, out, _ = masflow("ls", "--json")
    names = {(content["kind"], content["name"]) for content in last_json(out)}
    assert code == 0
    assert {("experiment", "quickstart"), ("mapping", "shared"), ("runtime", "local")} <= names
    assert masflow("init", "copy")[0] == 0
    code, out, err = masflow("check", "copy/examples/quickstart.yaml")
    assert code == 0, out + err
    assert (tmp_path / "copy/rewards/qa.py").read_bytes() == (ROOT / "rewards/qa.py").read_bytes()


def test_an_experiment_with_init_is_scored_and_played_from_there(toy: Toy, masflow: Masflow, tmp_path: Path):
    experiment = toy()
    assert masflow("train", experiment, "--out", "run", "--set", "train.steps=1")[0] == 0
    init = ("--set", f"init={tmp_path / 'run'}")
    scores = [
        last_json(masflow("eval", experiment, *words, "--json")[1])
        for words in ((), ("--checkpoint", "run"), init)
    ]
    assert scores[1] == scores[2] != scores[0]


def test_ls_prints_a_json_schema_for_editors(masflow: Masflow):
    code, out, _ = masflow("ls", "--schema", "workflow")
    found = json.loads(out)
    assert code == 0
    document = found["$defs"][found["$ref"].rpartition("/")[2]] if "$ref" in found else found
    assert {"roles", "nodes", "edges"} <= set(document["properties"])
    assert masflow("ls", "--schema", "reward")[0] == 2


def test_explain_prints_groups_with_their_expected_sizes(toy: Toy, masflow: Masflow):
    code, out, err = masflow("explain", toy(), "--format", "json")
    assert code == 0, err
    found = json.loads(out)
    assert {"digest", "graph", "models", "sampler", "groups", "rewards", "stages"} <= set(found)
    assert [group["expected_size"] for group in found["groups"]] == [4, 4]
    assert masflow("explain", toy())[0] == 0


def test_export_writes_folders_and_says_which(toy: Toy, masflow: Masflow):
    path = toy(
        ("mapping: {models: {policy: {roles: rest}}}", "mapping: {models: {own: {roles: rest, per: role}}}")
    )
    assert masflow("train", path, "--out", "run", "--set", "train.steps=1", "--json")[0] == 0
    code, out, _ = masflow("export", "run", "--to", "both")
    assert code == 0 and "full     caller: " in out and "both/own.echoer" in out
    assert sorted(p.name for p in Path("both").iterdir()) == ["own.caller", "own.echoer"]
    code, out, _ = masflow("export", "run@1", "--to", "one", "--role", "caller", "--json")
    found = last_json(out)
    assert code == 0 and (found["step"], found["to"]) == (1, str(Path("one").resolve()))
    assert [f["roles"] for f in found["folders"]] == [["caller"]] and Path("one/config.json").exists()
    code, _, err = masflow("export", "run", "--to", "one")
    assert (code, "isn't an empty folder" in err) == (3, True)
    code, _, err = masflow("export", "run", "--to", "two", "--role", "calle")
    assert (code, "fix: write 'caller'" in err) == (3, True)
    assert masflow("export", "run")[0] == 2
