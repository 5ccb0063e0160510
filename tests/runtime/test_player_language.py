"""Features of the workflow language that the player carries, each in one small workflow."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from masflow.compiler.plan import Plan
from masflow.models.engine import Reply, Request
from masflow.models.scripted import ScriptedEngine
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from masflow.trace import EpisodeKey, Trajectory

Play = Callable[..., Trajectory]
Compile = Callable[..., Plan]


def key(slot: int = 0) -> EpisodeKey:
    return EpisodeKey(7, "train", 3, slot, f"task{slot}", 0)


def prompts(trajectory: Trajectory) -> list[str]:
    return [turn.messages[-1].content for turn in trajectory.turns]


def test_a_chain_hands_values_on(played: Play):
    one = played(
        """
        name: chain
        task: {question: str}
        roles:
          a: {prompt: "Q: {{ question }}"}
          b: {prompt: "Plan: {{ first.text }}", reply: {tag: answer}}
        nodes: {first: {role: a}, second: {role: b}}
        edges: [start -> first -> second -> end]
        output: {said: "{{ second.answer }}"}
        """,
        {"a": ["look it up"], "b": ["<answer> 007 </answer>"]},
        {"question": "why"},
    )
    assert one.outcome == "ok"
    assert prompts(one) == ["Q: why", "Plan: look it up"]
    assert one.output == {"said": "007"}
    assert [turn.superstep for turn in one.turns] == [1, 2]
    assert one.predecessors == {one.turns[0].id: (), one.turns[1].id: (one.turns[0].id,)}


def test_memory_is_an_empty_list_where_nothing_is_recalled(played: Play):
    one = played(
        """
        name: remember
        roles: {a: {prompt: "{% for m in memory %}{{ m }}{% endfor %}recalled: {{ memory | length }}"}}
        nodes: {say: {role: a}}
        edges: [start -> say -> end]
        """,
        {"a": ["fine"]},
        {},
    )
    assert prompts(one) == ["recalled: 0"]


def test_a_loop_ends_when_its_condition_fails(played: Play):
    one = played(
        """
        name: loop
        params: {rounds: 3}
        roles: {a: {prompt: "round {{ visit }} after {{ history.say | map(attribute='text') | join(',') }}"}}
        nodes: {say: {role: a}}
        edges:
          - start -> say
          - say -> say when visits.say < params.rounds
          - say -> end
        output: {all: "{{ history.say }}"}
        """,
        {"a": ["x", "y", "z"]},
    )
    assert prompts(one) == ["round 1 after ", "round 2 after x", "round 3 after x,y"]
    assert one.output == {"all": [{"text": "x"}, {"text": "y"}, {"text": "z"}]}
    assert [turn.visit for turn in one.turns] == [1, 2, 3]


BRANCH = """
    name: branch
    roles:
      judge: {prompt: "say which?", reply: {tags: {next: [left, right], why: str?}}}
      a: {prompt: "say left"}
      b: {prompt: "say right"}
    nodes: {pick: {role: judge}, l: {role: a}, r: {role: b}}
    edges:
      - start -> pick
      - EDGE
      - l -> end
      - r -> end
    output: {l: "{{ l.text or none }}", r: "{{ r.text or none }}"}
"""


@pytest.mark.parametrize(
    "edge",
    [
        "{from: pick, switch: pick.next, to: {left: l, right: r}}",
        "pick -> l when pick.next == 'left'\n      - pick -> r",
        "pick -> r\n      - pick -> l when pick.next == 'left'",
    ],
)
def test_switches_and_conditions_choose_an_edge(played: Play, edge: str):
    workflow = BRANCH.replace("EDGE", edge)
    left = played(workflow, {"judge": ["<next>left</next>"], "a": ["L"], "b": ["R"]})
    right = played(workflow, {"judge": ["<next>right</next><why>so</why>"], "a": ["L"], "b": ["R"]})
    assert left.output == {"l": "L", "r": None}
    assert right.output == {"l": None, "r": "R"}


def test_a_switch_on_null_is_malformed_never_the_else(played: Play):
    one = played(
        """
        name: nothing
        roles:
          judge: {prompt: "say which?", reply: {json: {next: [left, right]}, on_malformed: continue}}
        state: {n: {type: int, default: 0}}
        nodes: {pick: {role: judge}, l: {set: {n: 1}}, r: {set: {n: 2}}}
        edges:
          - start -> pick
          - {from: pick, switch: "pick.next if pick else none", to: {left: l, right: r}}
          - l -> end
          - r -> end
        """,
        {"judge": ["no JSON here"]},
    )
    assert (one.outcome, one.turns[0].outcome) == ("malformed", "malformed")
    assert "switch" in one.detail


def test_when_skips_a_node_whose_value_is_then_null(played: Play):
    workflow = """
        name: skip
        task: {go: bool}
        roles: {a: {prompt: "say x"}}
        nodes: {say: {role: a, when: "go"}}
        edges: [start -> say -> end]
        output: {said: "{{ say }}", visits: "{{ visits.say }}"}
    """
    assert played(workflow, {"a": ["hi"]}, {"go": False}).output == {"said": None, "visits": 0}
    assert played(workflow, {"a": ["hi"]}, {"go": True}).output == {"said": {"text": "hi"}, "visits": 1}


def test_foreach_gives_a_list_in_input_order_and_a_malformed_item_stays_as_null(played: Play):
    def reader(request: Request) -> str:
        return "no tag" if request.item == 1 else f"<note>{request.messages[-1].content}!</note>"

    workflow = """
        name: items
        task: {docs: [str]}
        state: {seen: {type: [str], default: [], merge: append}}
        roles: {reader: {prompt: "{{ index }}={{ doc }}", reply: {tag: note}}}
        nodes: {read: {role: reader, foreach: docs, as: doc, write: {seen: "{{ doc }}"}}}
        edges: [start -> read -> end]
        output: {notes: "{{ read.note }}", all: "{{ read }}", ok: "{{ ok.read }}", seen: "{{ state.seen }}"}
    """
    one = played(workflow, {"reader": reader}, {"docs": ["a", "b", "c"]})
    assert one.output["notes"] == ["0=a!", None, "2=c!"]
    assert one.output["all"] == [{"note": "0=a!"}, None, {"note": "2=c!"}]
    assert one.output["ok"] == [True, False, True]
    assert one.output["seen"] == ["a", "c"]  # a malformed reply leaves state alone
    assert [turn.superstep for turn in one.turns] == [1, 1, 1]
    empty = played(workflow, {"reader": reader}, {"docs": []})
    assert (empty.outcome, empty.output["all"], empty.turns) == ("ok", [], ())


def test_items_in_order_see_the_writes_of_those_before(played: Play):
    one = played(
        """
        name: fold
        task: {docs: [str]}
        state: {text: {type: str, default: "-"}}
        roles: {writer: {prompt: "{{ state.text }}+{{ doc }}"}}
        nodes:
          fold: {role: writer, foreach: docs, as: doc, in_order: true, write: {text: "{{ result.text }}"}}
        edges: [start -> fold -> end]
        output: {text: "{{ state.text }}"}
        """,
        {"writer": lambda request: f"({request.messages[-1].content})"},
        {"docs": ["a", "b"]},
    )
    assert one.output == {"text": "((-+a)+b)"}
    assert [turn.superstep for turn in one.turns] == [1, 2]


def test_a_key_names_items_in_paths(played: Play):
    workflow = """
        name: keyed
        task: {docs: [{id: str}]}
        roles: {reader: {prompt: "{{ doc.id }}"}}
        nodes: {read: {role: reader, foreach: docs, as: doc, key: doc.id}}
        edges: [start -> read -> end]
    """
    one = played(workflow, {"reader": ["x"]}, {"docs": [{"id": "p"}, {"id": "q"}]})
    assert sorted(str(turn.step.item) for turn in one.turns) == ["p", "q"]
    twice = played(workflow, {"reader": ["x"]}, {"docs": [{"id": "p"}, {"id": "p"}]})
    assert twice.outcome == "tool_error"


DEBATE = """
    name: debate
    params: {agents: 3, rounds: 2}
    roles:
      debater:
        prompt: "{{ me }}/{{ index }}: {{ others | map(attribute='text') | join(' ') }}"
        copies: "{{ params.agents }}"
    nodes: {debate: {role: debater}}
    edges:
      - start -> debate
      - debate -> debate when visits.debate < params.rounds
      - debate -> end
    output: {last: "{{ debate.text }}"}
"""


def test_copies_speak_at_once_and_see_the_others_previous_values(played: Play):
    one = played(DEBATE, {"debater": lambda r: f"{r.member[-1]}{r.visit}"})
    assert prompts(one)[:3] == ["debater_0/0: ", "debater_1/1: ", "debater_2/2: "]
    assert prompts(one)[3:] == ["debater_0/0: 11 21", "debater_1/1: 01 21", "debater_2/2: 01 11"]
    assert one.output == {"last": ["02", "12", "22"]}
    assert {turn.role for turn in one.turns} == {"debater"}
    first = {turn.id for turn in one.turns[:3]}
    assert all(set(one.predecessors[turn.id]) == first for turn in one.turns[3:])


def test_a_family_has_one_speaker_chosen_at_run_time(played: Play):
    workflow = """
        name: family
        params: {team: [ann, bob]}
        task: {who: str}
        roles: {player: {prompt: "I am {{ me }}", names: "{{ params.team }}"}}
        nodes: {turn: {role: player, speaker: who}}
        edges: [start -> turn -> end]
    """
    one = played(workflow, {"player": ["hi"]}, {"who": "bob"})
    assert (one.turns[0].member, one.turns[0].role) == ("bob", "player")
    assert prompts(one) == ["I am bob"]
    assert played(workflow, {"player": ["hi"]}, {"who": "eve"}).outcome == "malformed"


def test_a_role_is_chosen_among_several(played: Play):
    workflow = """
        name: among
        task: {who: [red, blue]}
        roles: {red: {prompt: "say r"}, blue: {prompt: "say b"}}
        nodes: {turn: {role: "{{ who }}", among: [red, blue]}}
        edges: [start -> turn -> end]
    """
    one = played(workflow, {"red": ["1"], "blue": ["2"]}, {"who": "blue"})
    assert (one.turns[0].role, prompts(one)) == ("blue", ["say b"])


FAN = """
    name: fan
    state: {log: {type: [str], default: [], merge: append}, n: {type: int, default: 0, merge: add}}
    roles: {a: {prompt: "{{ state.log | join(',') }}"}}
    nodes:
      begin: {set: {log: "{{ ['s'] }}"}}
      l1: {role: a, write: {log: l1, n: 1}}
      l2: {role: a, write: {log: l2, n: 1}}
      r: {role: a, write: {log: r, n: 1}}
      after: {role: a, JOIN}
    edges: [start -> begin -> l1 & r, l1 -> l2 -> after, r -> after -> end]
    output: {log: "{{ state.log }}", n: "{{ state.n }}", l2: "{{ l2.text or none }}"}
"""


def test_branches_see_the_fork_plus_their_own_writes_and_merge_in_branch_order(played: Play):
    one = played(FAN.replace(", JOIN", ""), {"a": ["x"]})
    assert {turn.node: turn.messages[-1].content for turn in one.turns} == {
        "l1": "s",
        "l2": "s,l1",
        "r": "s",
        "after": "s,l1,l2,r",
    }
    assert one.output == {"log": ["s", "l1", "l2", "r"], "n": 3, "l2": "x"}
    by_node = {turn.node: turn for turn in one.turns}
    assert by_node["after"].superstep == 3
    assert set(one.predecessors[by_node["after"].id]) == {by_node["l2"].id, by_node["r"].id}


@pytest.mark.parametrize("join", ["any", "1"])
def test_a_join_takes_the_branches_with_the_fewest_turns(played: Play, join: str):
    one = played(FAN.replace("JOIN", f"join: {join}"), {"a": ["x"]})
    assert {turn.node: turn.outcome for turn in one.turns} == {
        "l1": "cancelled",
        "l2": "cancelled",
        "r": "ok",
        "after": "ok",
    }
    assert one.output == {"log": ["s", "r"], "n": 1, "l2": None}
    assert {t.node: t.superstep for t in one.turns}["after"] == 2


def test_visits_of_cancelled_branches_count_so_that_every_turn_has_a_path_of_its_own(played: Play):
    one = played(
        """
        name: again
        roles: {a: {prompt: "say x"}}
        nodes:
          round: {role: a}
          fast: {role: a}
          slow: {role: a}
          slower: {role: a}
          meet: {role: a, join: any}
        edges:
          - start -> fast & slow
          - slow -> slower -> meet
          - fast -> meet
          - meet -> round when visits.meet < 3
          - meet -> end
          - round -> fast & slow
        output: {slow: "{{ visits.slow }}", said: "{{ slow.text or none }}"}
        """,
        {"a": ["x"]},
    )
    assert one.outcome == "ok"
    paths = [turn.path for turn in one.turns]
    assert len(set(paths)) == len(paths) == 3 * 4 + 2
    assert sorted(t.visit for t in one.turns if t.node == "slow") == [1, 2, 3]
    assert one.output == {"slow": 3, "said": None}


def test_end_inside_a_fan_out_takes_effect_at_the_join(played: Play):
    workflow = """
        name: late
        roles: {a: {prompt: "say x", reply: {tag: t}}, b: {prompt: "say y"}}
        nodes: {l: {role: a}, r1: {role: b}, r2: {role: b}, after: {role: b}}
        edges: [start -> l & r1, l -> after, r1 -> r2 -> after -> end]
        output: {r: "{{ r2.text or none }}"}
    """
    one = played(workflow, {"a": ["no tag"], "b": ["fine"]})
    assert one.outcome == "malformed"
    assert sorted(turn.node for turn in one.turns) == ["l", "r1", "r2"]
    assert one.output == {"r": "fine"}


def test_a_call_and_a_set_node_compute(played: Play):
    one = played(
        """
        name: compute
        task: {words: [str]}
        state: {n: {type: int, default: 1}}
        nodes:
          count: {call: "fns.py:count", args: {words: "{{ words }}"}, set: {n: "{{ state.n + result }}"}}
          twice: {set: {n: "{{ state.n * 2 }}"}}
        edges: [start -> count -> twice -> end]
        output: {n: "{{ state.n }}", words: "{{ words }}"}
        """,
        {},
        {"words": ["a", "b"]},
        files={
            "fns.py": "def count(words: list[str]) -> int:\n    words.append('mine')\n    return len(words)\n"
        },
    )
    assert one.output == {"n": 8, "words": ["a", "b"]}  # (1 + 3) * 2; the function's own copy grew, not ours
    assert [(e.kind, e.value) for e in one.effects] == [("call", 3)]


def test_a_failing_function_is_a_tool_error_that_says_whose(played: Play):
    one = played(
        """
        name: broken
        nodes: {f: {call: "fns.py:f"}}
        edges: [start -> f -> end]
        """,
        {},
        files={"fns.py": "def f():\n    return 1 / 0\n"},
    )
    assert one.outcome == "tool_error"
    assert "fns.py:f" in one.detail
    assert "ZeroDivisionError" in one.detail


CHOICES = """
    name: choices
    task: {options: [str]}
    roles: {voter: {prompt: "say vote", reply: {choice: "{{ options }}"}}}
    nodes: {vote: {role: voter}}
    edges: [start -> vote -> end]
    output: {vote: "{{ vote.choice }}"}
"""


def test_choices_may_come_from_an_expression(played: Play):
    assert played(CHOICES, {"voter": [" red\n"]}, {"options": ["red", "blue"]}).output == {"vote": "red"}
    assert played(CHOICES, {"voter": ["green"]}, {"options": ["red", "blue"]}).outcome == "malformed"


def test_a_retry_makes_every_attempt_a_turn_and_the_last_one_counts(played: Play):
    workflow = """
        name: again
        roles: {a: {prompt: "say x", reply: {tag: t, on_malformed: {retry: 2}RULE}}}
        nodes: {say: {role: a}}
        edges: [start -> say -> end]
        output: {said: "{{ say.t }}"}
    """

    def third(request: Request) -> str:
        texts.append(request.seed)
        return "<t>ok</t>" if len(texts) == 3 else "no"

    texts: list[int] = []
    one = played(workflow.replace("RULE", ""), {"a": third})
    assert (one.outcome, one.output) == ("ok", {"said": "ok"})
    assert [(t.step.attempt, t.ok, t.last) for t in one.turns] == [
        (0, False, False),
        (1, False, False),
        (2, True, True),
    ]
    assert len(set(texts)) == 3  # each attempt has a seed of its own
    never = played(workflow.replace("RULE", ""), {"a": ["no"]})
    assert (never.outcome, len(never.turns), never.turns[-1].last) == ("malformed", 3, True)
    assert "no <t>" in never.detail
    default = played(workflow.replace("RULE", ", default: {t: none}"), {"a": ["no"]})
    assert (default.outcome, default.output) == ("ok", {"said": "none"})


CONVERSATION = """
    name: talk
    roles:
      a:
        {prompt: "first {{ visit }}", next_prompt: "then {{ visit }}", system: "be brief", conversation: KIND}
    nodes: {x: {role: a}, y: {role: a}}
    edges:
      - start -> x -> y
      - y -> x when visits.y < 2
      - y -> end
"""


@pytest.mark.parametrize(
    ("kind", "contents"),
    [
        ("none", [["first 1"], ["first 1"], ["first 2"], ["first 2"]]),
        (
            "role",
            [
                ["first 1"],
                ["first 1", "1", "then 1"],
                ["first 1", "1", "then 1", "2", "then 2"],
                ["first 1", "1", "then 1", "2", "then 2", "3", "then 2"],
            ],
        ),
        ("node", [["first 1"], ["first 1"], ["first 1", "1", "then 2"], ["first 1", "2", "then 2"]]),
    ],
)
def test_conversations_continue_by_role_or_by_node(played: Play, kind: str, contents: list[list[str]]):
    said = iter("1234")
    workflow = CONVERSATION.replace("KIND", kind)
    if kind == "none":
        workflow = workflow.replace('next_prompt: "then {{ visit }}", ', "")
    one = played(workflow, {"a": lambda _: next(said)})
    assert [[m.content for m in turn.messages[1:]] for turn in one.turns] == contents
    assert all(turn.messages[0].role == "system" for turn in one.turns)
    for turn in one.turns:
        assert turn.parent == next((m.turn_id for m in reversed(turn.messages) if m.turn_id), None)


def test_each_copy_has_a_conversation_of_its_own(played: Play):
    workflow = DEBATE.replace("copies:", "conversation: role\n        copies:")
    one = played(workflow, {"debater": lambda r: f"{r.member[-1]}{r.visit}"})
    for turn in one.turns[3:]:
        assert turn.messages[1].content == f"{turn.member[-1]}1"
        assert turn.parent in {t.id for t in one.turns[:3] if t.member == turn.member}


SUB = """
    name: parent
    task: {topic: str}
    state: {n: {type: int, default: 5}}
    workflows:
      team:
        name: team
        task: {about: str}
        params: {loud: false}
        state: {n: {type: int, default: 0}}
        roles: {worker: {prompt: "{{ about }} {{ visits.ask }} {{ params.loud | string }}"}}
        nodes: {ask: {role: worker, set: {n: "{{ state.n + 1 }}"}}}
        edges:
          - start -> ask
          - ask -> ask when visits.ask < 2
          - ask -> end
        output: {said: "{{ ask.text }}", n: "{{ state.n }}"}
    nodes:
      research: {workflow: team, args: {about: "{{ topic }}!"}, params: {loud: true}}
    edges: [start -> research -> end]
    output: {said: "{{ research.said }}", theirs: "{{ research.n }}", mine: "{{ state.n }}"}
"""


def test_a_sub_workflow_has_its_own_state_visits_and_names(played: Play):
    one = played(SUB, {"research/worker": ["a", "b"]}, {"topic": "cats"})
    assert one.output == {"said": "b", "theirs": 2, "mine": 5}
    assert [turn.node for turn in one.turns] == ["research/ask", "research/ask"]
    assert [turn.role for turn in one.turns] == ["research/worker", "research/worker"]
    assert prompts(one) == ["cats! 1 True", "cats! 2 True"]
    assert [(step.call, step.node, step.visit) for step in one.turns[1].path] == [
        ("", "research", 1),
        ("research", "ask", 2),
    ]


def test_limits_end_an_episode_by_name(played: Play):
    loop = """
        name: limited
        limits: {LIMIT}
        roles: {a: {prompt: "say x", reply: {max_tokens: 5}}}
        nodes: {say: {role: a}, stop: {role: a}}
        edges:
          - start -> say
          - say -> stop when say.text == 'stop'
          - say -> say
          - stop -> end
    """
    reply = Reply("", "go", prompt_tokens=6, reply_tokens=4)
    visits = played(loop.replace("LIMIT", "visits: 3"), {"a": lambda _: reply})
    assert (visits.outcome, len(visits.turns)) == ("limit", 3)
    turns = played(loop.replace("LIMIT", "turns: 2, visits: 9"), {"a": lambda _: reply})
    assert (turns.outcome, len(turns.turns)) == ("limit", 2)
    tokens = played(loop.replace("LIMIT", "tokens: 35"), {"a": lambda _: reply})
    assert (tokens.outcome, len(tokens.turns)) == (
        "limit",
        4,
    )  # 10 tokens a turn: the fifth would begin at 40
    assert "tokens" in tokens.detail
    items = """
        name: many
        limits: {items: 2}
        task: {docs: [str]}
        roles: {a: {prompt: "{{ d }}"}}
        nodes: {read: {role: a, foreach: docs, as: d}}
        edges: [start -> read -> end]
    """
    assert played(items, {"a": ["x"]}, {"docs": ["1", "2", "3"]}).outcome == "limit"


def test_hidden_fields_reach_calls_but_no_prompt(played: Play, compiled: Compile):
    workflow = """
        name: hidden
        task: {answers: {type: [str], hidden: true}}
        roles: {a: {prompt: "have a guess"}}
        nodes:
          say: {role: a}
          check: {call: "fns.py:check", args: {answers: "{{ answers }}", said: "{{ say.text }}"}}
        edges: [start -> say -> check -> end]
        output: {right: "{{ check }}"}
    """
    files = {"fns.py": "def check(answers: list[str], said: str) -> bool:\n    return said in answers\n"}
    assert played(workflow, {"a": ["x"]}, {"answers": ["x"]}, files=files).output == {"right": True}
    plan = compiled(workflow, files)
    graph = plan.graph
    for peek in ("{{ answers | join }}", "{{ task.answers | join }}"):  # the player itself, past the compiler
        nodes = tuple(replace(node, prompt=peek) if node.name == "say" else node for node in graph.nodes)
        player = Player(replace(plan, workflows={plan.root: replace(graph, nodes=nodes)}))
        [one] = play(player, [player.start({"answers": ["x"]}, key())], ScriptedEngine({"a": ["x"]}).generate)
        assert (one.outcome, one.turns) == ("tool_error", ())


def test_text_of_replies_is_never_rendered_again(played: Play):
    one = played(
        """
        name: inert
        roles: {a: {prompt: "{{ say.text if visits.say > 1 else 'x' }}"}}
        nodes: {say: {role: a}}
        edges:
          - start -> say
          - say -> say when visits.say < 2
          - say -> end
        """,
        {"a": ["{{ 1 / 0 }}"]},
    )
    assert (one.outcome, prompts(one)) == ("ok", ["x", "{{ 1 / 0 }}"])


def test_chance_in_templates_is_drawn_from_the_turns_seed(played: Play):
    workflow = """
        name: chance
        roles: {a: {prompt: "{{ range(50) | shuffle | join(',') }}"}}
        nodes: {x: {role: a}, y: {role: a}}
        edges: [start -> x -> y -> end]
    """
    first, second = played(workflow, {"a": ["1"]}), played(workflow, {"a": ["1"]})
    assert prompts(first) == prompts(second)
    assert prompts(first)[0] != prompts(first)[1]


def test_a_sub_workflow_runs_once_an_item_and_a_malformed_one_is_null(played: Play):
    workflow = """
        name: many
        task: {topics: [str]}
        workflows:
          team:
            name: team
            task: {about: str}
            roles: {worker: {prompt: "about {{ about }}", reply: {tag: t}}}
            nodes: {ask: {role: worker}}
            edges: [start -> ask -> end]
            output: {said: "{{ ask.t }}"}
        nodes:
          research: {workflow: team, foreach: topics, as: topic, args: {about: "{{ topic }}"}}
        edges: [start -> research -> end]
        output: {said: "{{ research.said }}"}
    """
    script = {"worker": lambda r: "no tag" if "dogs" in r.messages[-1].content else "<t>fine</t>"}
    one = played(workflow, script, {"topics": ["cats", "dogs"]})
    assert (one.outcome, one.output) == ("ok", {"said": ["fine", None]})
    assert [turn.path[0].item for turn in one.turns] == [0, 1]
    assert [turn.superstep for turn in one.turns] == [1, 1]


def test_a_sub_workflow_that_ends_early_ends_its_parent(played: Play):
    strict = SUB.replace('| string }}"}', '| string }}", reply: {tag: text}}')
    one = played(strict, {"worker": ["no tag"]}, {"topic": "cats"})
    assert (one.outcome, len(one.turns)) == ("malformed", 1)
    assert "research/ask" in one.detail


def test_state_starts_from_templates_and_refuses_values_of_another_type(played: Play):
    workflow = """
        name: typed
        params: {k: 2}
        task: {n: any}
        state: {n: {type: int, default: "{{ params.k * 2 }}"}}
        nodes: {put: {set: {n: "{{ n or state.n + 1 }}"}}}
        edges: [start -> put -> end]
        output: {n: "{{ state.n }}"}
    """
    assert played(workflow, {}, {"n": None}).output == {"n": 5}
    wrong = played(workflow, {}, {"n": "five"})
    assert (wrong.outcome, wrong.output) == ("tool_error", {"n": 4})
    assert "state.n: expected int, got 'five'" in wrong.detail
