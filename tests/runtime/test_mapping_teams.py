"""Whole runs of one team under many mappings: everything at once, partial sharing, stopped and resumed."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from masflow.compiler import compile_experiment
from masflow.models.experience import read_tokens
from masflow.models.weights import checksum
from masflow.runtime.controller import train
from masflow.runtime.local import LocalActor
from masflow.runtime.model_group import ModelGroup
from masflow.runtime.rundir import Interrupted, StopFlag, read_metrics
from masflow.runtime.team import Team

WORDS = ("red", "green", "blue", "white", "black", "pink", "grey", "brown")
WORKFLOW = """
name: chain
task: {word: str, answer: {type: str, hidden: true}}
roles:
  planner: {prompt: "plan {{ word }}", reply: {max_tokens: 3}}
  writer: {prompt: "write {{ plan.text }}", reply: {max_tokens: 3}}
  second: {prompt: "more {{ write.text }}", reply: {max_tokens: 3}}
  editor: {prompt: "edit {{ again.text }}", reply: {max_tokens: 3}}
  teller: {prompt: "tell {{ edit.text }}", reply: {max_tokens: 3}}
nodes:
  plan: {role: planner}
  write: {role: writer}
  again: {role: second}
  edit: {role: editor}
  tell: {role: teller}
edges: [start -> plan -> write -> again -> edit -> tell -> end]
output: {said: "{{ tell.text }}"}
rewards:
  - {name: odd, use: "odd.py:odd", level: turn, otherwise: 0, args: {said: "{{ result.text }}"}}
"""
REWARD = '''
def odd(said: str) -> float:
    """The share of letters that stand early in the alphabet, so that random replies differ."""
    return sum(letter < "m" for letter in said) / (1 + len(said))
'''
SMALL = "hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2"
QWEN = f"{{model_type: qwen3, {SMALL}, head_dim: 8, max_position_embeddings: 64, tie_word_embeddings: true}}"
LLAMA = f"{{model_type: llama, {SMALL}, max_position_embeddings: 64}}"
GPT2 = "{model_type: gpt2, n_embd: 16, n_layer: 1, n_head: 2, n_positions: 64}"


def wordpiece(file: str, config: str) -> str:
    return f"{{config: {config}, tokenizer: {{wordpiece: {{files: [{file}]}}}}}}"


def project(root: Path, mapping: str, more: str = "", steps: int = 2) -> Path:
    """An experiment of the chain; three vocabularies lie beside it."""
    root.mkdir(parents=True, exist_ok=True)
    experiment = f"""
workflow: chain.yaml
mapping: {{models: {mapping}}}
base: {wordpiece("qwen.jsonl", QWEN)}
data: {{train: tasks.jsonl}}
algorithm: {{use: grpo, samples: 4}}
train: {{steps: {steps}, tasks_per_step: 3, seed: 0, optimizer: {{lr: 1.0e-2}}}}
{more}"""
    texts = {"chain.yaml": WORKFLOW, "odd.py": REWARD, "e.yaml": experiment}
    words = ["plan write more edit tell", *WORDS]
    for name, order in (("qwen", words), ("llama", [*words, "quilt"]), ("gpt2", [*words[1:4], "zebra"])):
        texts[f"{name}.jsonl"] = json.dumps({"text": " ".join(order)}) + "\n"
    texts["tasks.jsonl"] = "".join(json.dumps({"word": w, "answer": w}) + "\n" for w in WORDS)
    for name, text in texts.items():
        (root / name).write_text(text)
    return root / "e.yaml"


def steps(out: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(out / "metrics.jsonl") if record["kind"] == "train"]


def turns(out: Path, columns: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(out / "trace.sqlite")) as db:
        return db.execute(f"SELECT {columns} FROM turns").fetchall()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, dict[str, str]]]:
    """Of each team that is closed: model → weight → its checksum."""
    found: list[dict[str, dict[str, str]]] = []
    close = Team.close

    def look_and_close(team: Team) -> None:
        found.append(
            {n: _weights(group) for n, group in team.groups.items() if isinstance(group, ModelGroup)}
        )
        close(team)

    monkeypatch.setattr(Team, "close", look_and_close)
    return found


def _weights(group: ModelGroup) -> dict[str, str]:
    [actor] = group.actors
    assert isinstance(actor, LocalActor)
    model = actor.instance.base.model
    return {name: checksum({name: weight}) for name, weight in model.named_parameters()}


def moved(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in after if after[name] != before[name]}


EVERYTHING = f"""{{
  full: {{roles: [planner]}},
  lora: {{roles: [writer, second], train: lora, lora: {{rank: 2}}, adapters: per_role,
    base: {wordpiece("llama.jsonl", LLAMA)}}},
  still: {{roles: [editor], train: frozen, base: {wordpiece("gpt2.jsonl", GPT2)}}},
  server: {{roles: [teller], endpoint: "URL", model: big}}}}"""


def check_ids(out: Path) -> None:
    """Text goes between models; what each noted of a turn is that text in its own vocabulary."""
    said = turns(out, "id, role, text")
    vocabularies = set()
    for model, roles in (("full", ["planner"]), ("lora", ["writer", "second"]), ("still", ["editor"])):
        tokenizer = AutoTokenizer.from_pretrained(out / "base" / model)
        vocabularies.add(json.dumps(sorted(tokenizer.get_vocab().items())))
        own = {turn: text for turn, role, text in said if role in roles}
        assert len(own) == 2 * 12 * len(roles)
        for turn, text in own.items():
            found = read_tokens(out / "tokens" / f"{model}.sqlite", turn)
            assert found is not None and tokenizer.decode(found[1], skip_special_tokens=True) == text
    assert len(vocabularies) == 3


def test_full_lora_frozen_and_endpoint_with_three_families_and_vocabularies_in_one_run(
    tmp_path: Path, chat_server: Any, says: Any, ends: list[dict[str, dict[str, str]]]
) -> None:
    chat_server.reply = lambda body: says(body["messages"][-1]["content"][:9])
    out = tmp_path / "run"
    plan = compile_experiment(project(tmp_path, EVERYTHING.replace("URL", chat_server.url)))
    train(plan, out)
    Team(plan, out).close()  # the bases that the run began with
    after, before = ends
    changed = {name: moved(before[name], after[name]) for name in after}
    assert len(changed["full"]) > 8 and not changed["still"]
    assert {name.split(".")[-2] for name in changed["lora"]} == {"policy_writer", "policy_second"}
    assert all("lora_" in name for name in changed["lora"])
    records = steps(out)
    learned = {"full", "lora/writer", "lora/second"}
    assert set().union(*(record["policies"] for record in records)) == learned
    assert all(record["served"]["server"]["replies"] == 12 for record in records)
    assert all(len(record["roles"]) == 5 for record in records)
    saved = {p.parent.name for p in (out / "checkpoints/step_000002/models").glob("*/*.safetensors")}
    assert saved == {"full", "lora"}
    check_ids(out)


def test_partial_sharing_trains_a_shared_model_on_its_roles_and_nobody_elses(tmp_path: Path) -> None:
    mapping = "{reason: {roles: [planner, editor]}, own: {roles: rest, per: role}}"
    out = tmp_path / "run"
    train(compile_experiment(project(tmp_path, mapping, steps=1)), out)
    [record] = steps(out)
    assert set(record["policies"]) == {"reason", "own.writer", "own.second", "own.teller"}
    assert record["policies"]["reason"]["turns"] > record["policies"]["own.writer"]["turns"]
    spoke = {policy: set() for policy in record["policies"]}
    for policy, role in turns(out, "policy, role"):
        spoke[policy].add(role)
    assert spoke.pop("reason") == {"planner", "editor"}
    assert spoke == {f"own.{role}": {role} for role in ("writer", "second", "teller")}
    files = sorted((out / "checkpoints/step_000001/models").glob("*/*.safetensors"))
    assert len(files) == 4
    assert len({checksum(load_file(file)) for file in files}) == 4


def test_who_shares_is_the_mappings_alone(tmp_path: Path) -> None:
    """One workflow, one reward, one experiment; only who plays whom differs."""
    kind = "train: lora, lora: {rank: 2}"
    shapes = {
        f"{{policy: {{roles: rest, {kind}}}}}": (1, 1),
        f"{{own: {{roles: rest, per: role, {kind}}}}}": (5, 5),
        f"{{reason: {{roles: [planner, editor], {kind}}}, rest: {{roles: rest, {kind}}}}}": (2, 2),
        f"{{m: {{roles: rest, {kind}, adapters: {{a: [planner], b: rest}}}}}}": (1, 2),
    }
    for number, (mapping, wanted) in enumerate(shapes.items()):
        plan = compile_experiment(project(tmp_path / str(number), mapping, steps=1))
        train(plan, tmp_path / str(number) / "run")
        [record] = steps(tmp_path / str(number) / "run")
        assert (len(plan.models), len(record["policies"])) == wanted


MIXED = f"""{{
  some: {{roles: [planner, teller], optimizer: {{lr: 3.0e-3, schedule: linear}}}},
  lora: {{roles: [writer, second], train: lora, base: {wordpiece("llama.jsonl", LLAMA)}, adapters: {{
    a: {{roles: [writer], lora: {{rank: 2, targets: [q_proj]}}, optimizer: {{lr: 2.0e-2, warmup_steps: 3}}}},
    b: {{roles: [second], lora: {{rank: 3}}}}}}}},
  still: {{roles: [editor], train: frozen, base: {wordpiece("gpt2.jsonl", GPT2)}}}}}"""


def test_a_stopped_run_of_unlike_policies_resumes_to_the_bits_of_one_that_never_stopped(
    tmp_path: Path,
) -> None:
    experiment = project(tmp_path, MIXED, steps=3)
    train(compile_experiment(experiment), tmp_path / "whole")
    stop = StopFlag()

    def on_event(kind: str, facts: dict[str, Any]) -> None:
        stop.requested = stop.requested or kind == "train"

    with pytest.raises(Interrupted):
        train(compile_experiment(experiment), tmp_path / "halves", on_event=on_event, stop=stop)
    assert not (tmp_path / "halves/checkpoints/step_000003").exists()
    train(compile_experiment(experiment), tmp_path / "halves", resume=True)
    whole, halves = (
        {
            file.relative_to(place).as_posix(): checksum(load_file(file))
            for file in place.glob("models/*/*.safetensors")
        }
        for place in (tmp_path / run / "checkpoints/step_000003" for run in ("whole", "halves"))
    )
    assert whole == halves and len(whole) == 3
    assert [r["policies"] for r in steps(tmp_path / "whole")] == [
        r["policies"] for r in steps(tmp_path / "halves")
    ]
