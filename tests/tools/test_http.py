"""http: real servers on this machine that die, refuse, dawdle and talk nonsense, and what comes of it."""

import gzip
import threading
from typing import Any

import pytest

from masflow.errors import EpisodeError, RunError
from masflow.spec.retrieval import HttpSettings
from masflow.tools.http import Pool
from tests.tools.search_server import Says, Server, passages

KEY = 'sk-5"ecret/key'


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


@pytest.fixture
def pool():
    """`pool(*servers, **settings)` with hardly any pauses."""
    made = []

    def make(*servers, minute_s=60.0, **settings):
        settings = {"urls": [s if isinstance(s, str) else s.url for s in servers], "rest_s": 60, **settings}
        made.append(Pool(HttpSettings.model_validate(settings), pause_s=0.001, minute_s=minute_s))
        return made[-1]

    yield make
    for one in made:
        for server in one.servers:
            server.client.close()


def threads(count, work):
    """Run `work(i)` on so many threads; their results in order."""
    found: list[Any] = [None] * count

    def one(i):
        found[i] = work(i)

    running = [threading.Thread(target=one, args=(i,)) for i in range(count)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(30)
    return found


# -- what is asked, and what comes back ---------------------------------------------------------------


def test_a_query_is_posted_and_passages_come_in_the_servers_order(serve, pool):
    server = serve(passages("one", "two", "three"))
    found = pool(server, top_k=2)(query="who\nis “it”?")
    assert found == {
        "text": "one\ntwo",
        "passages": [{"id": "d0", "text": "one"}, {"id": "d1", "text": "two"}],
        "ids": ["d0", "d1"],
        "scores": [1.0, 0.75],
    }
    (asked,) = server.asked
    assert (asked["method"], asked["path"], asked["body"]) == ("POST", "/search", {"query": "who\nis “it”?"})


def test_request_and_answer_take_the_shapes_that_the_settings_say(serve, pool):
    # the shape of a widely used retriever: a batch of one query, a list of lists, texts below `document`
    rows = [{"document": {"contents": "alpha", "page": {"title": "A"}}, "score": 3},
            {"document": {"contents": "beta"}, "score": None}]  # fmt: skip
    server = serve(Says({"result": [rows]}))
    search = pool(
        server, body={"queries": ["{query}"], "topk": 2, "return_scores": True}, params={"v": 2},
        headers={"X-Team": "red"}, passages="result.0", text="document.contents", id="document.key",
        fields={"title": "document.page.title"},
    )  # fmt: skip
    found = search(query="q")
    assert [p["text"] for p in found["passages"]] == ["alpha", "beta"]
    assert [p["title"] for p in found["passages"]] == ["A", None]
    assert found["scores"] == [3.0, None]
    assert len(set(found["ids"])) == 2 and found == search(query="q")  # ids are hashes of the texts
    asked = server.asked[0]
    assert asked["body"] == {"queries": ["q"], "topk": 2, "return_scores": True}
    assert asked["params"] == {"v": ["2"]} and asked["headers"]["X-Team"] == "red"


def test_a_get_request_and_a_bare_list_of_texts(serve, pool):
    server = serve(Says(["x", "y"]))
    shape = {"method": "GET", "passages": "", "text": "", "id": None, "score": None}
    assert pool(server, **shape)(query="a&b=c é")["text"] == "x\ny"
    assert pool(server.url + "/{query}", **shape)(query="a/b?é")["scores"] == [None, None]
    assert pool(server.url + "?k=1", params={"q": "{query}!"}, **shape)(query="z")["ids"]
    assert [(a["method"], a["path"], a["params"]) for a in server.asked] == [
        ("GET", "/search", {"query": ["a&b=c é"]}),
        ("GET", "/search/a%2Fb%3F%C3%A9", {}),
        ("GET", "/search", {"k": ["1"], "q": ["z!"]}),
    ]


def test_half_a_character_is_sent_as_a_question_mark_and_a_number_is_no_query(serve, pool):
    server = serve(passages())
    search = pool(server)
    assert search(query="a\ud800b")["passages"] == []
    assert server.asked[0]["body"] == {"query": "a?b"}
    with pytest.raises(TypeError, match="query must be text, got 3"):
        search(query=3)


def test_a_packed_answer_is_unpacked(serve, pool):
    server = serve(Says(gzip.compress(b'{"passages": [{"text": "one"}]}'), Content_Encoding="gzip"))
    assert pool(server)(query="q")["text"] == "one"
    assert server.asked[0]["headers"]["Accept-Encoding"] == "gzip"


# -- several servers ----------------------------------------------------------------------------------


def test_servers_are_asked_in_turn(serve, pool):
    servers = [serve(passages(name)) for name in "abc"]
    search = pool(*servers)
    assert [search(query="q")["text"] for _ in range(6)] == list("abcabc")


def test_a_server_that_dies_costs_no_query_and_rests(serve, pool):
    dying, sound = serve(passages("same")), serve(passages("same"))
    search = pool(dying, sound)
    assert [search(query="q")["text"] for _ in range(2)] == ["same"] * 2
    dying.answer = Says({"error": "disk"}, status=500)
    assert [search(query="q")["text"] for _ in range(6)] == ["same"] * 6
    assert len(dying.asked) == 2  # once while it lived, once when it failed
    dying.shutdown()
    dying.server_close()
    assert search(query="q")["text"] == "same"


def test_a_server_that_is_well_again_takes_its_turn_after_its_rest(serve, pool):
    ill, sound = serve(Says({}, status=503)), serve(passages("s"))
    search = pool(ill, sound, rest_s=0)
    assert search(query="q")["text"] == "s"
    ill.answer = passages("i")
    assert {search(query="q")["text"] for _ in range(4)} == {"i", "s"}


def test_with_every_server_resting_the_one_that_wakes_first_is_asked(serve, pool):
    first, second = serve(Says({}, status=500)), serve(Says({}, status=500))
    search = pool(first, second, retries=1)
    with pytest.raises(EpisodeError, match="no answer after 2 tries"):
        search(query="q")
    first.answer = second.answer = passages("well")
    assert search(query="q")["text"] == "well"
    assert (len(first.asked), len(second.asked)) == (2, 1)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 529])
def test_a_failure_that_passes_is_asked_again(serve, pool, status):
    answers = [Says({"error": {"message": "busy"}}, status=status)] * 2 + [passages("late")]
    server = serve(lambda _: answers.pop(0))
    assert pool(server)(query="q")["text"] == "late"
    assert len(server.asked) == 3


def test_tries_end_and_every_servers_last_words_are_told(serve, pool):
    one = serve(Says({"detail": "out of\n memory"}, status=500))
    two = serve(Says(b"<html>Bad gateway</html>", status=502))
    with pytest.raises(EpisodeError) as caught:
        pool(one, two, retries=2)(query="q")
    assert caught.value.outcome == "tool_error"
    assert caught.value.message == (
        f"http: no answer after 3 tries: {one.url}: 500: out of memory; "
        f"{two.url}: 502: <html>Bad gateway</html>"
    )
    assert len(one.asked) + len(two.asked) == 3


@pytest.mark.parametrize("status", [401, 403, 404, 405, 501, 301])
def test_a_server_that_will_never_answer_is_asked_once_and_the_others_too(serve, pool, status):
    elsewhere = serve(passages("stolen"))
    wrong = serve(Says({"error": "no"}, status=status, Location=elsewhere.url))
    right = serve(passages("right"))
    assert pool(wrong, right)(query="q")["text"] == "right"
    with pytest.raises(EpisodeError, match=f"no answer after 1 try: .*{status}: no"):
        pool(wrong)(query="q")
    assert len(wrong.asked) == 2
    assert elsewhere.asked == []  # a redirection is not followed


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_request_that_is_wrong_is_wrong_everywhere(serve, pool, status):
    one, two = serve(Says({"message": "which field?"}, status=status)), serve(passages("x"))
    search = pool(one, two)
    with pytest.raises(EpisodeError, match=f"after 1 try: {one.url}: {status}: which field"):
        search(query="q")
    assert two.asked == []
    one.answer = passages("y")
    assert [search(query="q")["text"] for _ in range(2)] == ["x", "y"]  # it hasn't been sent to rest


def test_quota_that_is_spent_is_not_waited_for(serve, pool):
    server = serve(Says({"error": {"code": "insufficient_quota", "message": "pay"}}, status=429))
    with pytest.raises(EpisodeError, match=r"after 1 try: .*429: pay"):
        pool(server)(query="q")


# -- pauses and limits --------------------------------------------------------------------------------


def test_the_pause_that_a_server_asks_for_is_kept_by_all_queries(serve, pool):
    answers = [Says({}, status=429, Retry_After="0.4")]
    server = serve(lambda _: answers.pop() if answers else passages("ok"))
    search = pool(server, retries=1)
    found = threads(1, lambda _: search(query="first"))  # is refused, waits, and is answered
    assert found[0]["text"] == "ok"
    assert server.times[1] - server.times[0] >= 0.4
    answers.append(Says({}, status=503, Retry_After="0.4"))
    with pytest.raises(EpisodeError):
        pool(server, retries=0)(query="of another pool, which knows nothing")
    answers.append(Says({}, status=503, Retry_After="0.4"))
    again = pool(server, retries=0)
    with pytest.raises(EpisodeError):
        again(query="refused")
    assert [one["text"] for one in threads(3, lambda i: again(query=str(i)))] == ["ok"] * 3
    assert min(server.times[-3:]) - server.times[-4] >= 0.4


def test_a_pause_of_an_hour_is_not_waited_for(serve, pool):
    hour = serve(Says({}, status=429, Retry_After="3600"))
    alone = pool(hour)
    for query in ("first", "second"):
        with pytest.raises(EpisodeError, match=r"asks not to be asked for 3(600|59\d) s"):
            alone(query=query)
    assert len(hour.asked) == 1
    assert pool(hour, serve(passages("other")))(query="q")["text"] == "other"


def test_no_more_requests_at_once_than_allowed_over_all_servers(serve, pool):
    two_are_here = threading.Barrier(2, timeout=20)

    def answer(asked):
        two_are_here.wait()  # passes in pairs only: fewer at once would break it
        return passages(asked["body"]["query"])

    servers = [serve(answer) for _ in range(3)]
    search = pool(*servers, max_concurrent=2)
    assert [one["text"] for one in threads(6, lambda i: search(query=f"q{i}"))] == [f"q{i}" for i in range(6)]
    assert max(server.most for server in servers) <= 2
    together = sorted(t for server in servers for t in server.times)
    assert len(together) == 6


def test_no_more_tries_a_minute_than_allowed_and_a_retry_counts(serve, pool):
    answers = [Says({}, status=500)]
    servers = [serve(lambda _: answers.pop() if answers else passages("ok")) for _ in range(2)]
    search = pool(*servers, per_minute=2, minute_s=0.4)
    threads(4, lambda i: search(query=str(i)))
    times = sorted(t for server in servers for t in server.times)
    assert len(times) == 5
    # starts are at least a window apart from the second one before; 50 ms for the way to the server
    assert all(later - earlier >= 0.35 for earlier, later in zip(times, times[2:], strict=False))


def test_an_answer_that_never_ends_or_unpacks_to_too_much_is_cut_off(serve, pool):
    bomb = gzip.compress(b"[" + b" " * 5_000_000 + b"]")
    assert len(bomb) < 10_000
    for answer in (Says(bomb, Content_Encoding="gzip"), Says(b"x" * 200_000)):
        with pytest.raises(EpisodeError, match="the answer is longer than 100000 bytes"):
            pool(serve(answer), max_bytes=100_000, retries=0)(query="q")


# -- slow, broken and senseless answers ---------------------------------------------------------------


def test_a_silent_server_runs_out_of_time_and_another_answers(serve, pool):
    release = threading.Event()
    silent, sound = serve(Says({}, after=release)), serve(passages("here"))
    assert pool(silent, sound, try_s=0.2)(query="q")["text"] == "here"
    with pytest.raises(EpisodeError) as caught:
        pool(silent, try_s=0.1, retries=1)(query="q")
    release.set()
    assert (caught.value.outcome, "no answer within 0.1 s" in caught.value.message) == ("timeout", True)


def test_a_server_that_drips_runs_out_of_time_too(serve, pool):
    dripping = serve(Says({"passages": []}, pieces=1))  # 16 bytes at 20 a second
    with pytest.raises(EpisodeError, match=r"no answer within 0\.3 s"):
        pool(dripping, try_s=0.3, retries=0)(query="q")


def test_a_connection_that_breaks_in_the_middle_is_asked_elsewhere(serve, pool):
    torn, sound = serve(Says({"passages": []}, drop=True)), serve(passages("whole"))
    assert pool(torn, sound)(query="q")["text"] == "whole"
    with pytest.raises(EpisodeError, match=r"no answer after 1 try: .*peer closed connection"):
        pool(torn, retries=0)(query="q")
    nobody = "http://127.0.0.1:9/search"
    with pytest.raises(EpisodeError, match=r"after 2 tries: http://127\.0\.0\.1:9/search: ConnectError"):
        pool(nobody, retries=1)(query="q")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not an answer (Expecting value"),
        (b"<html>", "not an answer (Expecting value: line 1 column 1 (char 0)): <html>"),
        (b'{"passages": [', "not an answer"),
        (b"[" * 100_000, "not an answer"),
        (b"\xff\xfe\x00", "not an answer"),
        ({"hits": []}, "the answer has no 'passages'; there: hits"),
        ([], "the answer has no 'passages'; there: a list"),
        ({"passages": {"a": 1}}, "'passages' must be a list, got a mapping"),
        ({"passages": None}, "'passages' must be a list, got null"),
        ({"passages": [{"id": 1}]}, "passage 0 has no 'text'; there: id"),
        ({"passages": ["bare"]}, "passage 0 has no 'text'; there: text"),
        ({"passages": [{"text": "a"}, {"text": 5}]}, "'text' of passage 1 must be text, got 5"),
        ({"passages": [{"text": "a", "id": True}]}, "'id' of passage 0 must be text or a whole number"),
        ({"passages": [{"text": "a", "id": [1]}]}, "must be text or a whole number, got a list"),
        ({"passages": [{"text": "a", "score": "high"}]}, "'score' of passage 0 must be a number, got text"),
        (b'{"passages": [{"text": "a", "score": NaN}]}', "NaN isn't a number"),
        (b'{"passages": [{"text": "a", "score": 1e999}]}', "'score' of passage 0 isn't finite"),
        (b'{"passages": [{"text": "\\ud800"}]}', "surrogates not allowed"),
        (b'{"passages": [{"text": "a", "id": ' + b"9" * 5000 + b"}]}", "not an answer"),
    ],
)  # fmt: skip
def test_nonsense_is_a_failure_of_that_server_and_another_is_asked(serve, pool, body, reason):
    bad, good = serve(Says(body)), serve(passages("sense"))
    assert pool(bad, good)(query="q")["text"] == "sense"
    with pytest.raises(EpisodeError) as caught:
        pool(bad, retries=0)(query="q")
    assert caught.value.outcome == "tool_error"
    assert reason in caught.value.message
    assert len(caught.value.message) < 800


@pytest.mark.parametrize(("packing", "reason"), [("gzip", "not gzip, as it says"), ("br", "packed as 'br'")])
def test_an_answer_that_cannot_be_unpacked_says_why(serve, pool, packing, reason):
    with pytest.raises(EpisodeError, match=reason):
        pool(serve(Says({"passages": []}, Content_Encoding=packing)), retries=0)(query="q")


# -- the key ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("header", "sent"), [("Authorization", f"Bearer {KEY}"), ("X-API-Key", KEY)])
def test_the_key_goes_into_its_header(serve, pool, monkeypatch, header, sent):
    monkeypatch.setenv("SEARCH_KEY", f" {KEY}\n")
    server = serve(passages("x"))
    pool(server, key_env="SEARCH_KEY", key_header=header)(query="q")
    assert {k.lower(): v for k, v in server.asked[0]["headers"].items()}[header.lower()] == sent


@pytest.mark.parametrize(
    "answer",
    [
        Says({"error": {"message": f"the key {KEY} is unknown"}}, status=401),
        Says({"echo": f"Bearer {KEY}"}, status=500),
        Says(KEY.encode(), status=502),
        Says(f"<{KEY}>".encode()),
        Says({"passages": [{"text": 5, KEY: 1}]}),
        Says({KEY: []}),
    ],
)
def test_a_key_that_a_server_says_again_is_never_shown(serve, pool, monkeypatch, answer):
    monkeypatch.setenv("SEARCH_KEY", KEY)
    search = pool(serve(answer), key_env="SEARCH_KEY", retries=0)
    with pytest.raises(EpisodeError) as caught:
        search(query="q")
    assert "ecret" not in str(caught.value) + repr(caught.value) + repr(search)


def test_a_key_in_a_passage_stays_out_of_the_trace(serve, pool, monkeypatch):
    monkeypatch.setenv("SEARCH_KEY", KEY)
    found = pool(serve(passages(f"you sent {KEY}")), key_env="SEARCH_KEY")(query="q")
    assert found["text"] == "you sent ***"


@pytest.mark.parametrize(
    ("value", "reason"), [(None, "it isn't set"), ("", "it isn't set"), ("my key", "can't be a key")]
)
def test_a_variable_without_a_key_stops_the_run(pool, monkeypatch, value, reason):
    monkeypatch.delenv("SEARCH_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SEARCH_KEY", value)
    with pytest.raises(RunError, match="SEARCH_KEY") as caught:
        pool("http://localhost:1/s", key_env="SEARCH_KEY")
    assert reason in str(caught.value) and "my key" not in str(caught.value)
