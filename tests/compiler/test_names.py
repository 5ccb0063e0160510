"""Which names a workflow's texts may use where: whole documents that must pass, and what must not."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from masflow.compiler import check, compile_workflow
from masflow.compiler.names import check_names
from masflow.compiler.regions import Regions
from masflow.compiler.scopes import GraphNames

FUNCTIONS = """
def edit(steps: list, change: dict): return steps
def free(a, b=None): return a
def f1(prediction, answers): return 1.0
def split(text: str): return text.split()
"""


@pytest.fixture
def problems(tmp_path: Path) -> Callable[..., list[tuple[str, str, int]]]:
    """(code, path, line) of every problem of a workflow text, warnings aside."""

    def problems_(text: str, **files: str) -> list[tuple[str, str, int]]:
        (tmp_path / "pyproject.toml").touch()
        (tmp_path / "fns.py").write_text(FUNCTIONS)
        (tmp_path / "corpus.jsonl").write_text('{"id": "1", "text": "a fact"}\n')
        for name, content in files.items():
            (tmp_path / f"{name}.yaml").write_text(textwrap.dedent(content))
        (tmp_path / "main.yaml").write_text(textwrap.dedent(text))
        found = check(tmp_path / "main.yaml")
        return [(p.code, p.path, p.line) for p in found if not p.code.startswith("warn-")]

    return problems_


M_ASK = """
    name: m_ask
    task:
      question: str
      answers: {type: [str], hidden: true}
    params: {rounds: 3, top_k: 5}
    state:
      steps: {type: [{question: str, answer: str}], default: []}
      guess: {type: str, default: ""}
    roles:
      planner:
        prompt: "Plan {{ question }}"
        reply: {json: {steps: [{question: str, answer: str}], answer: str}}
      searcher:
        prompt: |
          {{ question }}
          {% for step in state.steps %}
          {{ loop.index }}. {{ step.question }}: {{ step.answer }}
          {% endfor %}
          So far: {{ answer.answer if answer else plan.answer }}
        reply: {tags: {action: [search, stop], query: str?}}
      summariser: {prompt: "{{ search.query or question }}: {{ retrieve.text }}", reply: {tag: evidence}}
      updater:
        prompt: "{{ summarise.evidence }} {{ state.steps | map(attribute='question') | bullets }}"
        reply: {json: {step: int?, question: str, answer: str}}
      answerer: {prompt: "{{ state.guess }} {{ summarise.evidence }}", reply: {tag: answer}}
    tools:
      wiki: {use: bm25, corpus: corpus.jsonl, top_k: "{{ params.top_k }}"}
    nodes:
      plan:      {role: planner, set: {steps: "{{ result.steps }}", guess: "{{ result.answer }}"}}
      search:    {role: searcher}
      retrieve:  {tool: wiki, args: {query: "{{ search.query or '' }}"}}
      summarise: {role: summariser}
      update:    {role: updater}
      edit:
        call: "fns.py:edit"
        args: {steps: "{{ state.steps }}", change: "{{ update }}"}
        set: {steps: "{{ result }}"}
      answer:    {role: answerer, set: {guess: "{{ result.answer }}"}}
    edges:
      - start -> plan -> search
      - search -> end when search.action == 'stop'
      - search -> retrieve -> summarise -> update -> edit -> answer
      - answer -> search when visits.answer < params.rounds
      - answer -> end
    output: {answer: "{{ state.guess }}"}
    rewards:
      - name: f1
        use: fns.py:f1
        otherwise: 0
        measure: {after: [plan, answer], args: {prediction: "{{ result.answer }}", answers: "{{ answers }}"}}
        pay: {planner: value, answerer: value, searcher: gain, summariser: gain, updater: gain}
      - {name: form, use: well_formed, level: turn}
"""

DEBATE = """
    name: debate
    task: {question: str, answer: {type: str, hidden: true}}
    params: {agents: 4, rounds: 2}
    roles:
      debater:
        copies: "{{ params.agents }}"
        prompt: |
          You are {{ me }}, number {{ index }}. {{ question }}
          {% if visit > 1 %}
          You said {{ debate[index].answer if debate[index] else 'nothing' }}.
          {% for other in others | shuffle | take(5) %}
          - {{ other.answer }}
          {% endfor %}
          {% endif %}
        reply: {tag: answer}
    nodes:
      debate: {role: debater}
    edges:
      - start -> debate
      - debate -> debate when visits.debate < params.rounds
      - debate -> end
    output: {answers: "{{ debate.answer }}"}
    rewards:
      - name: right
        use: fns.py:f1
        level: turn
        otherwise: 0
        args: {prediction: "{{ result.answer }}", answers: "{{ answer }}"}
"""

MAP = """
    name: map_refine
    task: {documents: [{title: str, body: str}]}
    state: {draft: {type: str, default: ""}, seen: {type: [str], default: [], merge: append}}
    roles:
      reader:  {prompt: "{{ doc.title }}: {{ doc.body }} ({{ index }})", reply: {tag: gist}}
      refiner: {prompt: "{{ state.draft }} {{ batch | json }}", reply: {tag: draft}}
    nodes:
      read:   {role: reader, foreach: documents, as: doc, key: doc.title, write: {seen: "{{ result.gist }}"}}
      refine:
        role: refiner
        foreach: "read.gist | select | batch(2)"
        as: batch
        in_order: true
      keep: {set: {draft: "{{ refine[-1].draft if refine and refine[-1] else '' }}"}}
    edges: ["start -> read -> refine -> keep -> end"]
    output: {draft: "{{ state.draft }}", gists: "{{ read.gist }}"}
"""

TEAM = """
    name: teams
    task: {question: str}
    params: {team: [ann, bob]}
    roles:
      lead: {prompt: "{{ question }}", reply: {json: {next: [talk, finish], who: [ann, bob]}}}
      member: {names: "{{ params.team }}", prompt: "{{ me }}: {{ lead.who }} {{ hint }}", reply: text}
    nodes:
      lead: {role: lead}
      talk: {role: member, speaker: lead.who, with: {hint: "{{ team.word | upper }}"}}
      team: {workflow: sub, args: {topic: "{{ question }}"}}
    workflows:
      sub:
        name: sub
        task: {topic: str}
        roles: {worker: {prompt: "{{ topic }}", reply: {tag: word}}}
        nodes: {say: {role: worker}}
        edges: ["start -> say -> end"]
        output: {word: "{{ say.word }}", twice: ["{{ say.word }}", "{{ say.word }}"]}
    edges:
      - start -> team -> lead
      - {from: lead, switch: lead.next, to: {talk: talk, finish: end}}
      - talk -> end
    output: {words: "{{ team.twice | join(', ') }}", said: "{{ talk.text if talk else none }}"}
"""

ROUNDS = """
    name: rounds
    task: {spec: str}
    roles:
      coder:  {prompt: "{{ spec }} {% if tester %}{{ tester.code }}{% endif %}", reply: {code: python}}
      tester: {prompt: "{{ spec }} {{ coder.code if coder else '' }}", reply: {code: python}}
      judge:  {prompt: "{{ coder.code }} {{ tester.code }}", reply: {choice: [good, bad]}}
    nodes: {coder: {role: coder}, tester: {role: tester}, judge: {role: judge}}
    edges:
      - start -> open
      - open -> coder & tester -> judge
      - judge -> open when judge.choice == 'bad' and visits.judge < 5
      - judge -> end
    output: {code: "{{ coder.code }}"}
""".replace("judge: {role: judge}}", "judge: {role: judge}, open: {set: {}}}")


@pytest.mark.parametrize(
    "text", [M_ASK, DEBATE, MAP, TEAM, ROUNDS], ids=["m_ask", "debate", "map", "team", "rounds"]
)
def test_a_right_workflow_has_no_problem(problems, text):
    assert problems(text) == []


SMALL = """
    name: small
    task: {question: str, gold: {type: str, hidden: true}}
    state: {n: {type: int, default: 0}}
    roles:
      a: {prompt: "Say A", reply: {tags: {word: str, more: "str?"}}}
      b: {prompt: "Say B", reply: {tag: word}}
    tools: {sum: {use: calculator}}
    nodes:
      one: {role: a}
      two: {role: b}
      calc: {tool: sum, args: {expression: "1"}}
    edges:
      - start -> one
      - one -> two when one.word == 'x'
      - one -> calc
      - two -> calc
      - calc -> end
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('prompt: "Say B"', 'prompt: "{{ one.word }}"', []),
        ('prompt: "Say B"', 'prompt: "{{ nodes.one.word }} {{ task.question }} {{ state.n }}"', []),
        ('prompt: "Say B"', 'prompt: "{{ calc.x }}"', [("not-known-yet", "roles.b.prompt", 7)]),
        ('prompt: "Say B"', 'prompt: "{{ visits.calc }} {{ history.calc | length }}"', []),
        ('prompt: "Say B"', 'prompt: "{{ nodes.onee.word }}"', [("unknown-node", "roles.b.prompt", 7)]),
        ('prompt: "Say B"', 'prompt: "{{ gold }}"', [("hidden-field", "roles.b.prompt", 7)]),
        ('expression: "1"', 'expression: "{{ gold }}"', []),
        (
            'expression: "1"',
            'expression: "{{ two.word }}"',
            [("null-field", "nodes.calc.args.expression", 12)],
        ),
        ('expression: "1"', 'expression: "{{ two.word or one.word }}"', []),
        ('expression: "1"', "expression: \"{{ two.word if visits.two else '' }}\"", []),
        (
            'expression: "1"',
            'expression: "{{ one.more }}"',
            [("nullable-argument", "nodes.calc.args.expression", 12)],
        ),
        (
            'expression: "1"',
            'expression: "{{ state.n }}"',
            [("wrong-argument-type", "nodes.calc.args.expression", 12)],
        ),
        ("{role: b}", "{role: b, when: one.more}", [("condition-type", "nodes.two.when", 11)]),
        ("{role: b}", "{role: b, when: one.more == 'x'}", []),
        ("{role: b}", "{role: b, set: {n: '{{ visit }}'}}", []),
        ("{role: b}", "{role: b, set: {n: '{{ result.word }}'}}", [("state-type", "nodes.two.set.n", 11)]),
        ("{role: b}", "{role: b, set: {n: '{{ result.wrod }}'}}", [("unknown-field", "nodes.two.set.n", 11)]),
        ("one.word == 'x'", "item == 'x'", [("name-not-here", "edges.1", 15)]),
        ("one.word == 'x'", "two.word == 'x'", [("not-known-yet", "edges.1", 15)]),
        ("one.word == 'x'", "visit > 1 and one", [("condition-type", "edges.1", 15)]),
    ],
)
def test_a_change_is_judged_where_it_stands(problems, old, new, expected):
    assert old in SMALL
    assert problems(SMALL.replace(old, new, 1)) == expected


def test_a_nodes_own_condition_guards_its_texts(problems):
    text = SMALL.replace('prompt: "Say B"', 'prompt: "{{ one.more }}"')
    assert [code for code, _, _ in problems(text)] == ["null-printed"]
    assert problems(text.replace("{role: b}", "{role: b, when: one.more is not none}")) == []


def test_a_call_may_be_handed_null_only_where_it_takes_it(problems):
    text = SMALL.replace('{tool: sum, args: {expression: "1"}}', '{call: "fns.py:FN", args: ARGS}')
    given = text.replace("ARGS", '{a: "{{ one.more }}"}')
    assert problems(given.replace("FN", "free")) == []
    given = text.replace("ARGS", '{text: "{{ one.more }}"}')
    assert [code for code, _, _ in problems(given.replace("FN", "split"))] == ["nullable-argument"]
    given = text.replace("ARGS", "{text: \"{{ one.more or '' }}\"}")
    assert problems(given.replace("FN", "split")) == []


def test_rewards_see_hidden_fields_and_forgive_null(problems):
    reward = """
    rewards:
      - name: r
        use: fns.py:f1
        otherwise: 0
        when: "gold in (two.word or [])"
        args: {prediction: "{{ two.word }}", answers: "{{ gold }}"}
    """
    assert problems(SMALL + reward.rstrip() + "\n") == []
    assert [c for c, _, _ in problems(SMALL + reward.replace("two.word }}", "two.wrod }}"))] == [
        "unknown-field"
    ]
    assert [c for c, _, _ in problems(SMALL + reward.replace("{{ gold", "{{ item"))] == ["name-not-here"]


def test_a_hidden_field_reaches_a_sub_workflow_only_as_a_hidden_field(problems):
    text = """
        name: parent
        task: {gold: {type: str, hidden: true}}
        nodes: {sub: {workflow: child.yaml, args: {key: "{{ gold }}"}}}
        edges: ["start -> sub -> end"]
    """
    child = """
        name: child
        task: {key: FIELD}
        roles: {a: {prompt: "say a", reply: {tag: word}}}
        nodes: {say: {role: a}}
        edges: ["start -> say -> end"]
        output: {word: "{{ say.word }}"}
    """
    assert problems(text, child=child.replace("FIELD", "{type: str, hidden: true}")) == []
    assert [c for c, _, _ in problems(text, child=child.replace("FIELD", "str"))] == ["hidden-field"]


def test_a_prompt_file_has_its_own_lines(problems, tmp_path: Path):
    (tmp_path / "b.md").write_text("One.\n\n{{ one.word }}\n{{ questoin }}\n")
    problems(SMALL.replace('prompt: "Say B"', "prompt: b.md"))
    [problem] = check(tmp_path / "main.yaml")
    assert (problem.code, problem.line, problem.path) == ("unknown-name", 4, "roles.b.prompt")
    assert problem.file.endswith("b.md")
    assert "question" in problem.fix


def test_without_a_document_problems_stand_at_their_nodes(problems, tmp_path: Path):
    assert problems(SMALL) == []
    key, graphs = compile_workflow(tmp_path / "main.yaml")
    graph = graphs[key]
    wrong = graph.node("two")
    nodes = tuple(wrong if n.name == "two" else n for n in graph.nodes)
    object.__setattr__(wrong, "prompt", "{{ nope }}")
    found = check_names(graph, graphs, Regions.of(graph))
    assert [p.code for p in found] == ["unknown-name"]
    assert nodes == graph.nodes


def test_the_output_of_a_sub_workflow_has_its_types(problems, tmp_path: Path):
    assert problems(TEAM) == []
    key, graphs = compile_workflow(tmp_path / "main.yaml")
    value = GraphNames(graphs[key], graphs).value_of("team")
    assert str(value.type) == "{word: str, twice: [str]}"


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("text", "{text: str}"),
        ("{tag: a}", "{a: str}"),
        ('{tags: {a: int, b: "str?"}}', "{a: int, b: str?}"),
        ("{json: {a: [yes, no], c: any}}", "{a: [yes, no], c: any}"),
        ("{choice: [x, y]}", "{choice: [x, y]}"),
        ('{choice: "{{ params.words }}"}', "{choice: [u, v]}"),
        ('{choice: "{{ question.split() }}"}', "{choice: str}"),
        ("{code: python}", "{code: str}"),
        ("{regex: '(?P<a>x)'}", "{a: str}"),
        ("{regex: '(?P<a>x)?(?P<b>y)+(?:(?P<c>z)|w)(?=(?P<d>v))'}", "{a: str?, b: str, c: str?, d: str}"),
        ("{regex: '(?:(?P<a>x)y|z)*(?P<b>(?P<c>u)|v)(?(c)s|t)'}", "{a: str?, b: str, c: str?}"),
        ("{tag: a, on_malformed: continue}", "{a: str}?"),
        ("{tag: a, on_malformed: continue, default: {a: none}}", "{a: str}"),
        (
            "{json: {type: object, additionalProperties: false, required: [a],"
            " properties: {a: {type: string}, b: {type: integer}}}}",
            "{a: str, b: int?}",
        ),
    ],
)
def test_a_reply_gives_its_node_a_type(problems, tmp_path: Path, reply: str, expected: str):
    text = f"""
        name: one
        task: {{question: str}}
        params: {{words: [u, v]}}
        roles: {{a: {{prompt: "say it", reply: {reply}}}}}
        nodes: {{one: {{role: a}}}}
        edges: ["start -> one -> end"]
    """
    assert problems(text) == []
    key, graphs = compile_workflow(tmp_path / "main.yaml")
    assert str(GraphNames(graphs[key], graphs).value_of("one").type) == expected


@given(st.integers(1, 6), st.data())
def test_in_a_chain_exactly_the_nodes_before_are_known(length, data):
    from masflow.compiler.graph import Arrow, Graph, Node, RoleIR
    from masflow.spec.replies import TagReply

    reader = data.draw(st.integers(0, length - 1))
    read = data.draw(st.integers(0, length - 1))
    roles = (RoleIR("a", "say", reply=TagReply(tag="w")),)
    nodes = []
    for i in range(length):
        target = f"n{i + 1}" if i + 1 < length else "end"
        prompt = f"{{{{ n{read}.w }}}}" if i == reader else "say"
        nodes.append(Node(f"n{i}", "role", (Arrow((target,)),), role="a", prompt=prompt))
    graph = Graph("chain", roles=roles, nodes=tuple(nodes), start=(Arrow(("n0",)),))
    found = [p.code for p in check_names(graph, {"chain": graph}, Regions.of(graph))]
    assert found == ([] if read < reader else ["not-known-yet"])
