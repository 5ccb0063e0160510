"""Any workflow ends in a graph whose promises hold, or in a SpecError that says where."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from masflow.compiler import compile_workflow
from masflow.compiler.regions import Regions
from masflow.errors import SpecError
from masflow.project import Source, load_data

NAMES = [f"n{i}" for i in range(6)]
ANYWHERE = [*NAMES, "start", "end", "nowhere"]
EXPRESSIONS = [
    "visits.n0 < 3",
    "n1.next == 'a'",
    "n1 is none",
    "n9.x",
    "1 +",
    "state.notes",
    "n2.text == 'x'",
]


@st.composite
def edges(draw):
    sources = " & ".join(draw(st.lists(st.sampled_from(ANYWHERE), min_size=1, max_size=2)))
    targets = " & ".join(draw(st.lists(st.sampled_from(ANYWHERE), min_size=1, max_size=3)))
    kind = draw(st.sampled_from(["plain", "plain", "when", "switch"]))
    if kind == "switch":
        words = draw(st.lists(st.sampled_from(["a", "b", "c"]), max_size=3, unique=True))
        return {
            "from": sources,
            "switch": "n1.next",
            "to": {w: draw(st.sampled_from(ANYWHERE)) for w in words},
        }
    return f"{sources} -> {targets}" + (
        f" when {draw(st.sampled_from(EXPRESSIONS))}" if kind == "when" else ""
    )


@st.composite
def nodes(draw):
    node = draw(
        st.sampled_from(
            [
                {"role": "talker"},
                {"role": "chooser"},
                {"role": "nobody"},
                {"set": {"notes": ["{{ n1.next or '' }}"]}},
                {"write": {"notes": ["x"]}, "set": {"other": 1}},
                {"tool": "sums", "args": {"expression": "{{ n2.text }}"}},
                {"workflow": {"name": "in", "nodes": {"a": {"set": {}}}, "edges": ["start -> a -> end"]}},
                {"human": {"ask": "Is it so?", "in_training": "skip"}},
            ]
        )
    )
    more = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "when": st.sampled_from(EXPRESSIONS),
                "foreach": st.sampled_from(["[1, 2]", "state.notes", "n2.text"]),
                "join": st.sampled_from(["any", "all", 1, 2]),
                "limits": st.just({"visits": 2}),
            },
        )
    )
    return {**node, **more}


@st.composite
def workflows(draw):
    return {
        "name": "random",
        "task": {"question": "str"},
        "state": {
            "notes": {"type": ["str"], "default": [], "merge": draw(st.sampled_from(["replace", "append"]))}
        },
        "roles": {
            "talker": {"prompt": "Say {{ question }}", "copies": draw(st.sampled_from([None, 2]))},
            "chooser": {"prompt": "Choose {{ question }}", "reply": {"json": {"next": ["a", "b"]}}},
        },
        "tools": {"sums": {"use": "calculator"}},
        "nodes": {n: draw(nodes()) for n in draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))},
        "edges": draw(st.lists(edges(), max_size=8)),
    }


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(workflows())
def test_a_random_workflow_ends_in_a_sound_graph_or_in_problems_with_a_place(tmp_path, data):
    try:
        root, graphs = compile_workflow(load_data(data, Source("random.yaml"), "workflow", tmp_path))
    except SpecError as error:
        assert error.problems
        assert all(p.code and p.message and p.fix and p.file for p in error.problems)
        return
    for graph in graphs.values():
        regions = Regions.of(graph)
        names = [n.name for n in graph.nodes]
        assert all(regions.reachable(n) and regions.may_precede(n, "end") for n in names)
        assert all(n.arrows and (n.arrows[-1].when is None) for n in graph.nodes)
        for fan_out in regions.fan_outs:
            inside = {name: regions.successors[name] for name in fan_out.nodes}
            assert all(set(out) <= fan_out.nodes | {fan_out.join} for out in inside.values())
            assert sum(map(len, fan_out.branches)) == len(fan_out.nodes)
    assert root == "random"


@st.composite
def chains_with_fan_outs(draw, depth=2, counter=None):
    """Well-formed edges: a chain of nodes, some of them fan-outs of chains, meeting at the next node."""
    counter = counter if counter is not None else iter(range(1000))
    length = draw(st.integers(1, 3))
    names, edges_ = [], []
    previous = None
    first = None
    for _ in range(length):
        name = f"n{next(counter)}"
        names.append(name)
        if previous is not None:
            edges_ += [f"{p} -> {name}" for p in previous]
        first = first or name
        previous = [name]
        if depth and draw(st.booleans()):
            parts = [draw(chains_with_fan_outs(depth=depth - 1, counter=counter)) for _ in range(2)]
            edges_.append(f"{name} -> " + " & ".join(part[0] for part in parts))
            previous = [last for part in parts for last in part[3]]
            for part in parts:
                names += part[1]
                edges_ += part[2]
    if len(previous or []) > 1:
        name = f"n{next(counter)}"
        names.append(name)
        edges_ += [f"{p} -> {name}" for p in previous or []]
        previous = [name]
    return first, names, edges_, previous


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chains_with_fan_outs())
def test_structured_fan_outs_always_compile_and_everything_has_run_at_the_end(tmp_path, drawn):
    first, names, edges_, last = drawn
    data = {
        "name": "structured",
        "nodes": {name: {"set": {}} for name in names},
        "edges": [f"start -> {first}", *edges_, *(f"{name} -> end" for name in last)],
    }
    root, graphs = compile_workflow(load_data(data, Source("structured.yaml"), "workflow", tmp_path))
    regions = Regions.of(graphs[root])
    assert all(regions.must_precede(name, "end") for name in names)
    assert len(regions.fan_outs) == sum(" & " in edge for edge in edges_)
    assert all(not regions.concurrent(name, last[0]) for name in names)
