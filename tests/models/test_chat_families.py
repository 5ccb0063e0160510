"""Templates in the manner of five families: conversations keep what was sampled, fork where history is
rewritten, and tools are called in the family's own form, by one path for episodes and demonstrations.

The templates beside this file are written for it; they do what the families' templates do to history, system
prompts, dates, turns and tool calls.
"""

from __future__ import annotations

import json
import re
import sqlite3
import textwrap
from collections.abc import Callable, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from masflow.compiler import compile_experiment
from masflow.compiler.chat import dialect_of
from masflow.compiler.plan import Plan
from masflow.errors import RunError, SpecError
from masflow.models.dialects import DIALECTS
from masflow.models.drawn import reply_of, row_of
from masflow.models.engine import Reply, Request
from masflow.models.experience import Experience, Row
from masflow.models.tokens import ChatTokens, Prompt
from masflow.runtime.controller import train
from masflow.runtime.episodes import play
from masflow.runtime.evaluate import roles
from masflow.runtime.player import Player
from masflow.spec.mapping import Chat
from masflow.trace import EpisodeKey, Message, Scored, Trajectory

FOLDER = Path(__file__).parent / "chat_templates"


@dataclass(frozen=True)
class Family:
    """What a family's tokenizer has. `plain` are added tokens that aren't special."""

    name: str
    end: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    bos: str | None = None
    is_metaspace: bool = False
    dialect: str | None = None

    @property
    def template(self) -> str:
        return (FOLDER / f"{self.name}.jinja").read_text()


_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
_HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")
_BRACKETS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
FAMILIES = {
    f.name: f
    for f in (
        Family("qwen3", "<|im_end|>", ("<|endoftext|>", "<|im_start|>"), _TAGS, dialect="hermes"),
        Family("llama3", "<|eot_id|>", _HEADERS, bos="<|begin_of_text|>", dialect="llama"),
        Family("mistral", "</s>", ("<s>", *_BRACKETS, "[/TOOL_RESULTS]"), (), "<s>", True, "mistral"),
        Family("smollm2", "<|im_end|>", ("<|endoftext|>", "<|im_start|>"), dialect="smollm"),
        Family("gemma", "<end_of_turn>", ("<bos>", "<start_of_turn>", "<eos>"), bos="<bos>"),
    )
}
CALLERS = [name for name, family in FAMILIES.items() if family.dialect]
TEXT = "what is the capital of france? it is paris, the city of light. look it up: a river is the seine"


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer with the family's special tokens; `</s>`-like ends are the end of sequence."""
    family = FAMILIES[name]
    core = Tokenizer(models.BPE())
    if family.is_metaspace:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        core.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = [*map(chr, range(33, 127)), "▁", "\n", "…"]
    else:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([TEXT] * 4, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=family.bos, eos_token=family.end)
    made.add_special_tokens({"additional_special_tokens": list(family.special)})
    made.add_tokens(list(family.plain))
    made.chat_template = family.template
    return made


def end_of(name: str) -> int:
    token = tokenizer_of(name).eos_token_id
    assert isinstance(token, int)
    return token


def chat_of(name: str, **options: Any) -> ChatTokens:
    tokenizer = tokenizer_of(name)
    return ChatTokens(
        tokenizer,
        (end_of(name),),
        Chat(**options),
        FAMILIES[name].dialect or "text",
        f"{name}.jinja",
    )


def spelled(name: str, text: str) -> tuple[int, ...]:
    """Ids of a text letter by letter (added tokens whole): not how its tokenizer would write it."""
    tokenizer = tokenizer_of(name)
    blank, line = ("▁", "\n") if FAMILIES[name].is_metaspace else ("Ġ", "Ċ")
    marks = "|".join(map(re.escape, sorted(tokenizer.get_added_vocab(), key=len, reverse=True)))
    pieces: list[str] = []
    for part in re.split(f"({marks})", text):
        whole = part in tokenizer.get_added_vocab()
        pieces += [part] if whole else [{" ": blank, "\n": line}.get(c, c) for c in part]
    ids = tokenizer.convert_tokens_to_ids(pieces)
    assert isinstance(ids, list) and tokenizer.unk_token_id is None and None not in ids
    return tuple(ids)


class Letters:
    """A RolloutEngine that speaks given texts letter by letter, and keeps rows as the real one does."""

    repeats = True

    def __init__(self, name: str, chat: ChatTokens, said: Sequence[str]):
        self.name, self.chat, self.said = name, chat, list(said)
        self.experience = Experience()
        self.prompts: list[Prompt] = []

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        return [self._reply(request) for request in requests]

    def _reply(self, request: Request) -> Reply:
        prompt = self.chat.prompt(request.messages, self.experience.get(request.parent), request.node)
        self.prompts.append(prompt)
        said = self.said.pop(0)
        stopped = any(stop in said for stop in request.sampling.stop)
        ids = (*spelled(self.name, said), *(() if stopped else (self.chat.end_id,)))
        row = row_of(request, prompt, ids, (0.0,) * len(ids), 0, self.chat)
        self.experience.add([row])
        return reply_of(row, "stop")


def talk(name: str, chat: ChatTokens, messages: list[Message], said: Sequence[str], asked: str) -> list[Row]:
    """Rows of a conversation in which each reply is answered by one more question."""
    experience, rows = Experience(), []
    parent = None
    for number, text in enumerate(said):
        prompt = chat.prompt(messages, experience.get(parent))
        ids = (*spelled(name, text), chat.end_id)
        reply = chat.decode(ids)
        parent = f"t{number}"
        row = Row(parent, "m", prompt.ids, ids, (), 0, prompt.text, reply, prefix=prompt.prefix)
        rows.append(replace(row, forked=prompt.forked))
        experience.add([row])
        messages = [*messages, Message("assistant", reply, parent), Message("user", asked)]
    return rows


ASK, SYSTEM = Message("user", "what is it?"), Message("system", "be short")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_continues_with_what_was_sampled(name: str) -> None:
    # FIELD_PROBLEMS, Tokens: decoding and re-encoding drifts.
    chat = chat_of(name)
    rows = talk(name, chat, [ASK], ["it is paris", "the seine", "light"], "and the river?")
    for before, row in pairwise(rows):
        assert not row.forked and row.prefix == len(before.prompt_ids + before.reply_ids)
        assert row.prompt_ids[: row.prefix] == before.prompt_ids + before.reply_ids
    # What the template would write, but for white space and the spelling of replies, is what the model read.
    read = chat.tokenizer.decode(rows[-1].prompt_ids)
    assert "".join(read.split()) == "".join(rows[-1].prompt_text.split())
    assert chat.end_id == chat.tokenizer.convert_tokens_to_ids(FAMILIES[name].end)
    assert read.count(FAMILIES[name].end) == rows[-1].prompt_text.count(FAMILIES[name].end)


@pytest.mark.parametrize(
    ("name", "forked"),
    [
        ("qwen3", False),
        ("llama3", False),
        ("smollm2", False),
        ("gemma", False),  # its text stands in the first question for good
        ("mistral", True),  # its text moves to the last question
    ],
)
def test_a_system_prompt_stays_or_the_row_forks(name: str, forked: bool) -> None:
    chat = chat_of(name)
    first, second = talk(name, chat, [SYSTEM, ASK], ["it is paris", "the seine"], "and the river?")
    assert "be short" in first.prompt_text and "be short" in second.prompt_text
    assert second.forked is forked and (second.prefix == 0) is forked
    if forked:
        assert second.prompt_ids == tuple(
            chat.tokenizer(second.prompt_text, add_special_tokens=False).input_ids
        )


def test_thoughts_that_the_template_drops_fork_the_row() -> None:
    # FIELD_PROBLEMS, Tokens: templates drop reasoning or tool calls from history.
    thought = "<think>\nit is a city\n</think>\n\nit is paris"
    first, second = talk("qwen3", chat_of("qwen3"), [ASK], [thought, "the seine"], "and the river?")
    assert second.forked and "it is a city" not in second.prompt_text
    assert first.text == thought  # and so are the ids that are trained
    first, second = talk("smollm2", chat_of("smollm2"), [ASK], [thought, "the seine"], "and the river?")
    assert not second.forked and "it is a city" in second.prompt_text


def test_thinking_is_switched_by_the_template() -> None:
    empty = "<think>\n\n</think>\n\n"
    assert chat_of("qwen3", thinking=False).prompt([ASK]).text.endswith(f"assistant\n{empty}")
    assert chat_of("qwen3", thinking=True).prompt([ASK]).text.endswith("assistant\n")
    # The empty thought is dropped from history: each turn forks.
    _, second = talk("qwen3", chat_of("qwen3", thinking=False), [ASK], ["it is paris", "x"], "and?")
    assert second.forked and empty not in second.prompt_text.removesuffix(empty)
    with pytest.raises(RunError, match=r"llama3.jinja doesn't know 'enable_thinking'"):
        chat_of("llama3", thinking=True)


def test_prompts_know_no_clock() -> None:
    assert "Today is 26 Jul 2024\n" in chat_of("llama3").prompt([ASK]).text
    assert "Today is 1 May 1\n" in chat_of("llama3", options={"date_string": "1 May 1"}).prompt([ASK]).text


def test_who_doesnt_take_turns_is_told_with_the_node() -> None:
    for name, words in (("mistral", "must take turns"), ("gemma", "take turns")):
        with pytest.raises(
            RunError, match=rf"node ask: {name}.jinja:\d+ refuses the messages 'user user': .*{words}"
        ):
            chat_of(name).prompt([ASK, ASK], where="ask")


def test_the_token_that_the_template_writes_behind_a_reply_ends_it() -> None:
    for name, end in (("qwen3", "<|endoftext|>"), ("gemma", "<eos>")):  # as tokenizers of bases have it
        own = deepcopy(tokenizer_of(name))
        own.eos_token, base_end = end, own.get_added_vocab()[end]
        chat = ChatTokens(own, (base_end,))
        assert chat.end_id == end_of(name) and chat.stop_ids == {end_of(name), base_end}
        assert chat.decode(chat.reply("paris")) == "paris"
    assert chat_of("llama3").tokenizer.convert_tokens_to_ids("<|eom_id|>") in chat_of("llama3").stop_ids


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content }}\n{% for %}", r"own.jinja:2: Expected an expression"),
        ("a\n{{ 'x' + 1 }}", r"own.jinja:2 refuses the messages 'user': TypeError"),
        ("{{ messages[0].content }}{{ messages[1].content + 'x' if messages | length == 2 }}{{ nothing.x }}",
         "own.jinja:1 refuses the messages 'user': 'nothing' is undefined"),
    ],
)  # fmt: skip
def test_a_broken_template_is_told_with_its_file_and_line(template: str, message: str) -> None:
    with pytest.raises(RunError, match=message):
        ChatTokens(deepcopy(tokenizer_of("qwen3")), (0,), Chat(template=template), file="own.jinja")


@pytest.mark.parametrize("name", CALLERS)
def test_dialects_are_told_from_templates(name: str) -> None:
    assert dialect_of(FAMILIES[name].template) == FAMILIES[name].dialect
    assert dialect_of(FAMILIES["gemma"].template) is None
    assert dialect_of("{{ tools }}<tool_call><function=x>") is None


# -- ReAct roles ---------------------------------------------------------------------------------

WORKFLOW = """
name: double
task: {n: int}
tools: {double: {use: "tool.py:double"}}
roles:
  solver: {system: SYSTEM, prompt: "double {{ n }} twice", tools: [double], max_calls: 4,
    reply: {tag: answer}, sampling: {train: {stop: STOP}}}
nodes: {solve: {role: solver}}
edges: [start -> solve -> end]
output: {answer: "{{ solve.answer }}"}
rewards: [{name: form, use: well_formed, level: turn}]
"""
EXPERIMENT = """
workflow: double.yaml
mapping: {models: {m: {roles: rest, chat: {tools: template, template: chat.jinja}}}}
base:
  config: {model_type: qwen3, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, head_dim: 8}
  tokenizer: {wordpiece: {files: [words.jsonl]}}
data: {train: tasks.jsonl}
train: {steps: 1}
"""
KEY = EpisodeKey(1, "train", 0, 0, "task", 0)


@pytest.fixture
def plan_of(tmp_path: Path) -> Callable[..., Plan]:
    """`plan_of(family, system)`: one ReAct role whose tools the family's template describes."""

    def make(name: str, system: str = "be short", tools: str = "template", stop: Sequence[str] = ()) -> Plan:
        (tmp_path / "workflows").mkdir(exist_ok=True)
        texts = {
            "double.yaml": WORKFLOW.replace("SYSTEM", json.dumps(system) if system else "null").replace(
                "STOP", json.dumps(list(stop))
            ),
            "exp.yaml": EXPERIMENT.replace("tools: template", f"tools: {tools}"),
            "tool.py": "def double(n: int) -> int:\n    'Twice a number.'\n    return 2 * n\n",
            "chat.jinja": FAMILIES[name].template,
            "words.jsonl": '{"text": "a"}\n',
            "tasks.jsonl": '{"n": 3}\n',
        }
        for file, text in texts.items():
            (tmp_path / file).write_text(textwrap.dedent(text), encoding="utf-8")
        return compile_experiment(tmp_path / "exp.yaml")

    return make


def call(name: str, n: int) -> str:
    """A call as the model writes it: its spaces aren't the template's."""
    return {
        "qwen3": f'<tool_call>\n{{"name":"double", "arguments":{{"n":{n}}}}}\n</tool_call>',
        "smollm2": f'<tool_call>[{{"name":"double","arguments":{{"n":{n}}}}}]</tool_call>',
        "llama3": f'{{"name":"double", "parameters":{{"n":{n}}}}}',
        "mistral": f'[TOOL_CALLS] [{{"name":"double","arguments":{{"n":{n}}}}}]',
    }[name]


def played(plan: Plan, name: str, said: Sequence[str]) -> tuple[Trajectory, Letters]:
    [model] = plan.models
    own = tokenizer_of(name)
    chat = ChatTokens.of(model, own, (end_of(name),))
    engine = Letters(name, chat, said)
    player = Player(plan)
    [trajectory] = play(player, [player.start({"n": 3}, KEY)], engine.generate)
    return trajectory, engine


@pytest.mark.parametrize("name", CALLERS)
def test_tool_calls_go_round_in_the_familys_form(name: str, plan_of: Callable[..., Plan]) -> None:
    plan = plan_of(name, "" if name == "mistral" else "be short")
    said = [call(name, 3), call(name, 6), "<answer>12</answer>"]
    trajectory, engine = played(plan, name, said)
    assert trajectory.output == {"answer": "12"} and [t.outcome for t in trajectory.turns] == ["ok"] * 3
    assert [e.value for e in trajectory.effects] == [6, 12]
    first, second, third = engine.experience.rows([t.id for t in trajectory.turns])
    # The tools are described once, by the template; the results are told in its own form.
    assert first.prompt_text.count('"double"') == third.prompt_text.count('"double"') - 2 == 1
    assert not any(row.forked for row in (first, second, third))
    for before, row, text in ((first, second, said[0]), (second, third, said[1])):
        assert row.prompt_ids[: row.prefix] == before.prompt_ids + before.reply_ids
        assert before.text == text and before.reply_ids == (*spelled(name, text), engine.chat.end_id)
    for number, row in ((6, second), (12, third)):
        told = engine.chat.tokenizer.decode(row.prompt_ids)
        assert re.search(TOLD[name].replace("N", str(number)), told), told


TOLD = {
    "qwen3": r"<tool_response>\nN\n</tool_response>",
    "llama3": r"<\|start_header_id\|>ipython<\|end_header_id\|>\n\n\"N\"<\|eot_id\|>",
    "mistral": r'\[TOOL_RESULTS\] ?{"content": "N", "call_id": "call\d{5}"}\[/TOOL_RESULTS\]',
    "smollm2": r"<\|im_start\|>tool\nN<\|im_end\|>",
}


@pytest.mark.parametrize("name", ["qwen3", "smollm2"])
def test_the_closing_mark_of_a_call_may_be_the_stop_string(name: str, plan_of: Callable[..., Plan]) -> None:
    said = [call(name, 3), "<answer>6</answer>"]
    trajectory, engine = played(plan_of(name, stop=["</tool_call>"]), name, said)
    assert trajectory.output == {"answer": "6"} and "</tool_call>" not in trajectory.turns[0].text
    first, second = engine.experience.rows([t.id for t in trajectory.turns])
    assert not second.forked and second.prompt_ids[: second.prefix] == first.prompt_ids + first.reply_ids
    added = engine.chat.tokenizer.decode(second.prompt_ids[second.prefix :])
    assert added.startswith(FAMILIES[name].end) and "</tool_call>" not in added


def test_thoughts_stay_between_the_calls_of_one_visit(plan_of: Callable[..., Plan]) -> None:
    thought = "<think>\nfirst <tool_call> once\n</think>\n\n"
    said = [thought + call("qwen3", 3), "<think>\nso\n</think>\n\n<answer>6</answer>"]
    trajectory, engine = played(plan_of("qwen3"), "qwen3", said)
    assert trajectory.output == {"answer": "6"}
    first, second = engine.experience.rows([t.id for t in trajectory.turns])
    assert not second.forked and second.prompt_ids[: second.prefix] == first.prompt_ids + first.reply_ids


def test_a_system_prompt_that_the_template_moves_forks_between_calls(plan_of: Callable[..., Plan]) -> None:
    trajectory, engine = played(plan_of("mistral"), "mistral", [call("mistral", 3), "<answer>6</answer>"])
    assert trajectory.output == {"answer": "6"} and engine.experience.num_forked == 1


WRONG = {
    "qwen3": ["<tool_call>{n</tool_call>", "<tool_call>{}", '<tool_call>[{"name": "double"}, 1]</tool_call>'],
    "smollm2": ["<tool_call>[]</tool_call>", '<tool_call>[{"name": "triple"}]</tool_call>'],
    "llama3": [
        '{"name": "double", "parameters": {"n": "x"}}',
        '<|python_tag|>{"name"',
        "<|python_tag|>print(1)",
    ],
    "mistral": ['[TOOL_CALLS] {"name"', "[TOOL_CALLS] [1]", "[TOOL_CALLS] [] [TOOL_CALLS] []"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRONG.items() for text in texts])
def test_a_call_that_does_not_parse_is_malformed_and_counted(
    name: str, text: str, plan_of: Callable[..., Plan]
) -> None:
    # FIELD_PROBLEMS, Tokens: tool-call parse errors scroll by.
    plan = plan_of(name)
    trajectory, _ = played(plan, name, [call(name, 3), text])
    bad = trajectory.turns[-1]
    assert (bad.outcome, bad.ok, bad.text) == ("malformed", False, text) and bad.detail
    found = roles(plan, [Scored(trajectory, {}, {}, {})])
    assert found["solver"]["tool_call_error_frac"] == 0.5


@pytest.mark.parametrize("name", CALLERS)
def test_demonstrations_take_the_path_of_episodes(name: str, plan_of: Callable[..., Plan]) -> None:
    """Written in masflow's own form, they are learned in the family's, and continue without a fork."""
    plan = plan_of(name, "" if name == "mistral" else "be short")
    mine = '<tool_call>{"name": "double", "arguments": {"n": 3}}</tool_call>'
    turns = [{"node": "solve", "reply": mine}, {"node": "solve", "reply": "<answer>6</answer>"}]
    shown = Player(plan).demonstrate({"task": {"n": 3}, "turns": turns}, KEY)
    first, second = shown.turns
    assert DIALECTS[plan.models[0].dialect].read(first.text)[1:3] == ("double", {"n": 3})
    sampled, engine = played(plan, name, [first.text, second.text])
    assert [t.messages for t in sampled.turns] == [t.messages for t in shown.turns]
    chat = engine.chat
    prompt, reply = chat.prompt(first.messages), chat.reply(first.text)
    assert prompt == engine.prompts[0] and reply[-1] == chat.end_id
    row = Row(first.id, "m", prompt.ids, reply, (), -1, prompt.text, first.text)
    after = chat.prompt(second.messages, row)
    assert not after.forked and after.ids[: after.prefix] == prompt.ids + reply
    assert after.text == engine.prompts[1].text


def test_auto_leaves_a_base_made_from_a_config_to_plain_text(plan_of: Callable[..., Plan]) -> None:
    assert plan_of("qwen3", tools="auto").models[0].dialect == "text"
    assert plan_of("qwen3", tools="text").models[0].dialect == "text"
    with pytest.raises(SpecError, match="this base's chat template knows no tools"):
        plan_of("gemma")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_a_model_learns_the_familys_form_from_plain_demonstrations(name: str, tmp_path: Path) -> None:
    """Trained on calls in masflow's own form, it calls the tool in its family's, and no row forks."""
    tokenizer_of(name).save_pretrained(tmp_path / "tokenizer")
    system = "" if name == "mistral" else "be short"
    workflow = WORKFLOW.replace("SYSTEM", json.dumps(system) if system else "null").replace("STOP", "[]")
    shape = "hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, max_position_embeddings: 1024"
    experiment = EXPERIMENT.replace("hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2", shape)
    experiment = experiment.replace("tokenizer: {wordpiece: {files: [words.jsonl]}}", "tokenizer: tokenizer")
    experiment = experiment.replace("train: tasks.jsonl", "train: tasks.jsonl, eval: tasks.jsonl")
    experiment = experiment.replace(", template: chat.jinja", "").replace(
        "train: {steps: 1}", "train: {steps: 0}"
    )
    demos = [
        {"node": "solve", "reply": '<tool_call>{"name": "double", "arguments": {"n": 3}}</tool_call>'},
        {"node": "solve", "reply": "<answer>6</answer>"},
    ]
    texts = {
        "double.yaml": workflow.replace("{tag: answer}", "{tag: answer, max_tokens: 96}"),
        "exp.yaml": experiment
        + "warm_start: {data: demos.jsonl, steps: 60, batch: 4, optimizer: {lr: 5.0e-3}}\n",
        "tool.py": "def double(n: int) -> int:\n    'Twice a number.'\n    return 2 * n\n",
        "tasks.jsonl": '{"n": 3}\n',
        "demos.jsonl": json.dumps({"task": {"n": 3}, "turns": demos}) + "\n",
    }
    for file, text in texts.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    plan = compile_experiment(tmp_path / "exp.yaml")
    assert plan.models[0].dialect == FAMILIES[name].dialect
    train(plan, tmp_path / "run", only_warm_start=True)
    with closing(sqlite3.connect(tmp_path / "run" / "trace.sqlite")) as db:
        rows = db.execute("SELECT text, outcome, messages FROM turns WHERE split = 'eval'").fetchall()
    good = [text for text, outcome, _ in rows if outcome == "ok"]
    assert any(DIALECTS[plan.models[0].dialect].has(text) for text in good)
    assert any(text == "<answer>6</answer>" for text in good)
    with closing(sqlite3.connect(tmp_path / "run" / "tokens" / "m.sqlite")) as db:
        [(forked, continued)] = db.execute("SELECT sum(forked), sum(prefix > 0) FROM tokens").fetchall()
    assert forked == 0 and continued > 0
