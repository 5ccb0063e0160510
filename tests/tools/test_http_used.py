"""http in workflows: settings that are refused, settings that reach the pool, episodes that search."""

import threading

import pytest

from masflow.compiler import check, compile_workflow
from masflow.compiler.graph import FunctionIR, Graph, ToolIR
from masflow.compiler.plan import Plan
from masflow.errors import EpisodeError
from masflow.models.scripted import ScriptedEngine
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from masflow.spec.retrieval import HttpSettings
from masflow.spec.tools import settings_faults
from masflow.tools import ToolBox
from masflow.tools.http import Pool
from masflow.trace import EpisodeKey
from tests.tools.search_server import Says, Server, passages


@pytest.fixture
def serve():
    """`serve(answer)`: a server that answers so, until the test ends."""
    servers = []

    def start(answer):
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "missing key 'urls'"),
        ({"urls": []}, "'urls' is empty"),
        ({"urls": ["host/x"]}, "must begin with http:// or https://"),
        ({"urls": ["http://"]}, "name a host"),
        ({"urls": ["http://h:99999/"]}, "must begin with"),
        ({"urls": ["http://u:pass@h/"]}, "holds a credential"),
        ({"urls": ["http://h/?api_key=x"]}, "holds a credential"),
        ({"urls": ["http://h/#top"]}, "is never sent"),
        ({"urls": ["http://h/", "http://h/"]}, "stands there twice"),
        ({"urls": "http://h/", "method": "GET", "body": {}}, "a GET request has no body"),
        ({"urls": "http://h/", "body": {"q": "query"}}, "nothing in the request takes the query"),
        ({"urls": "http://h/", "method": "GET", "params": {"q": 1}}, "nothing in the request takes"),
        ({"urls": "http://h/", "key_env": "sk-123"}, "never a key itself"),
        ({"urls": "http://h/", "key_header": "X-Key"}, "takes the key, and there is none"),
        ({"urls": "http://h/", "headers": {"Authorization": "Bearer sk"}}, "looks like a credential"),
        ({"urls": "http://h/", "body": {"q": "{query}", "api_key": "sk"}}, "looks like a credential"),
        ({"urls": "http://h/", "headers": {"a b": "x"}}, "'a b' isn't a header"),
        ({"urls": "http://h/", "headers": {"a": "x\r\nb: c"}}, "'a' isn't a header"),
        ({"urls": "http://h/", "passages": "a..b"}, "'a..b' isn't a path"),
        ({"urls": "http://h/", "fields": {"text": "t"}}, "is a field of every passage already"),
        ({"urls": "http://h/", "max_retries": 2}, "retries"),
        ({"urls": "http://h/", "try_s": 0}, "'try_s' is 0; it must be more than 0"),
        ({"urls": ["http://h h/"]}, "must begin with"),
        ({"urls": "http://h/", "headers": {"X-Sig": ["sk-123"]}}, "setting 'headers.X-Sig'"),
        ({"url": "http://h/"}, "urls"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings, message):
    faults = settings_faults("http", settings)
    assert message in " ".join(fault.message + fault.fix for fault in faults)
    assert "sk" not in "".join(f.message for f in faults).replace("ask", "")
    assert "pass@" not in "".join(f.message for f in faults)


WORKFLOW = """
name: find
task: {questions: [str]}
tools: {search: {use: http, SETTINGS}}
nodes:
  hits: {tool: search, foreach: questions, as: q, args: {query: "{{ q }}"}}
edges: [start -> hits -> end]
output: {texts: "{{ hits.text }}"}
"""


def compiled(tmp_path, settings):
    file = tmp_path / "find.yaml"
    file.write_text(WORKFLOW.replace("SETTINGS", settings))
    assert check(file) == []
    _, graphs = compile_workflow(file)
    return graphs["find"]


def test_settings_in_a_workflow_reach_the_pool_and_the_tools_own_limit_is_another(tmp_path):
    graph = compiled(
        tmp_path,
        'urls: ["http://a/s", "http://b/s"], body: {q: "{query}"}, try_s: 3, timeout_s: 50, retries: 7, '
        "rest_s: 4, max_concurrent: 5, per_minute: 6, max_bytes: 700, top_k: 2, passages: p, key_env: K_E",
    )
    tool = graph.tools[0]
    assert tool.timeout_s == 50
    assert HttpSettings.model_validate(tool.settings) == HttpSettings(
        urls=("http://a/s", "http://b/s"), body={"q": "{query}"}, try_s=3, retries=7, rest_s=4,
        max_concurrent=5, per_minute=6, max_bytes=700, top_k=2, passages="p", key_env="K_E",
    )  # fmt: skip


def test_a_call_that_is_given_up_lets_go_of_its_place(serve):
    release = threading.Event()
    server = serve(Says({"passages": []}, after=release))
    box = ToolBox(Plan(root="w", workflows={"w": Graph(name="w")}))
    settings = {"urls": [server.url], "max_concurrent": 1, "try_s": 0.5}
    tool = ToolIR("search", FunctionIR("http"), settings=settings, timeout_s=0.1)
    with pytest.raises(EpisodeError) as caught:
        box.call("w", tool, {"query": "q"}, {})
    assert caught.value.outcome == "timeout"
    release.set()
    server.answer = passages("next")
    patient = ToolIR("search", FunctionIR("http"), settings=settings, timeout_s=20)
    assert box.call("w", patient, {"query": "q"}, {})["text"] == "next"
    made = box.made["w/search"]
    assert isinstance(made, Pool)
    for one in made.servers:
        one.client.close()


def played(graph, questions):
    player = Player(Plan("find", {"find": graph}))
    state = player.start({"questions": questions}, EpisodeKey(7, "train", 3, 0, "t", 0))
    (trajectory,) = play(player, [state], ScriptedEngine({}).generate)
    pool = player.toolbox.made["find/search"]
    assert isinstance(pool, Pool)
    for server in pool.servers:
        server.client.close()
    return trajectory


def test_a_visit_asks_all_its_queries_at_the_same_time_and_a_dead_server_leaves_no_trace(serve, tmp_path):
    three = threading.Barrier(3, timeout=20)

    def answer(asked):
        three.wait()  # passes only with three requests at once, over both servers
        return passages(f"<{asked['body']['query']}>")

    dead = "http://127.0.0.1:9/search"
    servers = [serve(answer), serve(answer)]
    urls = ", ".join(f'"{url}"' for url in (dead, *(server.url for server in servers)))
    one = played(compiled(tmp_path, f"urls: [{urls}]"), ["a", "b", "c"])
    assert (one.outcome, one.output) == ("ok", {"texts": ["<a>", "<b>", "<c>"]})
    assert [effect.args for effect in one.effects] == [{"query": q} for q in "abc"]
    assert "127.0.0.1" not in repr(one)
    assert sum(len(server.asked) for server in servers) == 3


def test_a_query_that_nobody_answers_ends_its_episode_and_the_others_are_asked(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("SEARCH_KEY", "sk-12345678")

    def answer(asked):
        lost = asked["body"]["query"] == "b"
        return Says({"error": "no index for sk-12345678"}, status=404) if lost else passages("found")

    one = played(compiled(tmp_path, f'urls: "{serve(answer).url}", key_env: SEARCH_KEY'), ["a", "b", "c"])
    assert one.outcome == "tool_error"
    assert "404: no index for ***" in one.detail and "sk-12345678" not in repr(one)
    assert [effect.error is None for effect in one.effects] == [True, False, True]
