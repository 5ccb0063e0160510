"""Regions: answers read off drawings by hand, and laws against a slow reference."""

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from masflow.compiler.graph import Arrow, Graph, Node
from masflow.compiler.regions import Regions, with_joins

# start -> fork -> (a1 -> a2) & b -> meet -> end, and meet -> fork
FORK = {
    "start": ["fork"],
    "fork": ["a1 & b"],
    "a1": ["a2"],
    "a2": ["meet"],
    "b": ["meet"],
    "meet": ["fork", "end"],
}


def test_branches_meet_at_their_immediate_post_dominator(drawn):
    graph = with_joins(drawn(FORK))
    assert graph.node("fork").arrows[0].join == "meet"
    assert Regions.of(graph).join_of("fork") == "meet"
    assert Regions.of(graph).join_of("a1") is None


def test_branches_that_never_meet_before_the_end_meet_there(drawn):
    graph = with_joins(drawn({"start": ["a & b"], "a": ["end"], "b": ["end"]}))
    assert graph.start[0].join == "end"


def test_nodes_of_two_branches_are_concurrent_and_those_of_one_are_not(drawn):
    regions = Regions.of(drawn(FORK))
    assert regions.concurrent("a1", "b") and regions.concurrent("b", "a2")
    assert not regions.concurrent("a1", "a2")
    assert not regions.concurrent("b", "b")
    assert not regions.concurrent("meet", "b") and not regions.concurrent("fork", "a1")


def test_after_a_join_of_all_every_branch_has_run(drawn):
    regions = Regions.of(drawn(FORK))
    assert all(regions.must_precede(name, "meet") for name in ("fork", "a1", "a2", "b"))
    assert not regions.must_precede("a1", "b")
    assert regions.must_precede("b", "end")


def test_after_a_join_of_any_no_single_branch_is_sure_to_have_run(drawn):
    regions = Regions.of(drawn(FORK, {"meet": "any"}))
    assert not any(regions.must_precede(name, "meet") for name in ("a1", "a2", "b"))
    assert regions.must_precede("fork", "meet")


def test_a_branch_that_passes_a_node_only_sometimes_does_not_promise_it(drawn):
    edges = {"start": ["a & b"], "a": ["x", "meet"], "x": ["meet"], "b": ["meet"], "meet": ["end"]}
    regions = Regions.of(drawn(edges))
    assert not regions.must_precede("x", "meet")
    assert regions.must_precede("a", "meet") and regions.must_precede("b", "meet")


def test_nested_fan_outs_that_meet_at_one_node_all_have_run(drawn):
    edges = {
        "start": ["a & b"], "a": ["c & d"], "c": ["meet"], "d": ["meet"], "b": ["meet"], "meet": ["end"],
    }  # fmt: skip
    regions = Regions.of(drawn(edges))
    assert all(regions.must_precede(name, "meet") for name in "abcd")
    assert regions.concurrent("c", "d") and regions.concurrent("c", "b") and not regions.concurrent("a", "c")


def test_a_side_entrance_into_a_branch_takes_the_promise_away(drawn):
    edges = {"start": ["b", "fork"], "fork": ["a & b"], "a": ["meet"], "b": ["meet"], "meet": ["end"]}
    regions = Regions.of(drawn(edges))
    assert not regions.must_precede("a", "meet")
    assert regions.must_precede("b", "meet")


def test_a_loop_precedes_itself_and_a_straight_node_does_not(drawn):
    regions = Regions.of(drawn(FORK))
    assert regions.in_cycle("a1", "b") and regions.may_precede("a1", "a1")
    assert regions.cycle_of("meet") == {"fork", "a1", "a2", "b", "meet"}
    straight = Regions.of(drawn({"start": ["a"], "a": ["end"]}))
    assert not straight.in_cycle("a", "a") and straight.cycle_of("a") == frozenset()


@pytest.mark.parametrize(("name", "reached"), [("a", True), ("lost", False), ("start", True), ("end", True)])
def test_reachable_means_a_path_from_start(drawn, name, reached):
    assert Regions.of(drawn({"start": ["a"], "a": ["end"], "lost": ["a"]})).reachable(name) is reached


@st.composite
def graphs_without_fan_outs(draw):
    size = draw(st.integers(1, 7))
    names = [f"n{i}" for i in range(size)]
    ways = {
        name: tuple(
            Arrow((t,)) for t in draw(st.lists(st.sampled_from([*names, "end"]), min_size=1, max_size=3))
        )
        for name in names
    }
    return Graph("g", nodes=tuple(Node(n, "set", a) for n, a in ways.items()), start=(Arrow(("n0",)),))


@settings(max_examples=80, deadline=None)
@given(graphs_without_fan_outs())
def test_without_fan_outs_must_precede_is_that_every_path_passes(graph):
    """Reference: `a` lies on every path to `b` when `b` can't be reached once `a` is taken out."""
    regions = Regions.of(graph)
    for b in [n.name for n in graph.nodes if regions.reachable(n.name)]:
        for a in [n.name for n in graph.nodes if n.name != b]:
            without = regions.digraph.copy()
            without.remove_node(a)
            assert regions.must_precede(a, b) == (not nx.has_path(without, "start", b))


@settings(max_examples=80, deadline=None)
@given(graphs_without_fan_outs())
def test_may_precede_is_that_a_path_exists(graph):
    regions = Regions.of(graph)
    for a in regions.digraph:
        for b in regions.digraph:
            reference = any(nx.has_path(regions.digraph, s, b) for s in regions.digraph.successors(a))
            assert regions.may_precede(a, b) == reference
