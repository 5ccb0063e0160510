"""The endpoint engine against a real server: what is sent and read, tried again, limited and told."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from typing import Any

import pytest

from masflow.errors import RunError
from masflow.models.endpoint_client import find_key
from masflow.models.endpoint_engine import EndpointEngine
from masflow.models.engine import Reply, Request, SamplingParams
from masflow.spec.mapping import Endpoint
from masflow.trace import Message

KEY = "sk-very-secret-0123456789abcdef"


@pytest.fixture(autouse=True)
def no_key_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def engine(chat_server) -> Iterator[Callable[..., EndpointEngine]]:
    """`engine(check=…, **fields of the endpoint)`: an engine that pauses for hundredths of a second."""
    made: list[EndpointEngine] = []

    def make(check: Callable[[], None] = lambda: None, minute_s: float = 60.0, **fields: Any):
        endpoint = Endpoint.model_validate({"url": chat_server.url, "timeout_s": 5.0, **fields})
        made.append(EndpointEngine(endpoint, "big", check=check, pause_s=0.01, minute_s=minute_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


def request(number: int = 0, text: str = "how do you do", **sampling: Any) -> Request:
    how = SamplingParams(**{"temperature": 0.5, "max_tokens": 7, **sampling})
    return Request(f"turn{number}", "judge", (Message("user", text),), how, seed=2**40 + number)


def one(engine: EndpointEngine, *, text: str = "how do you do", **sampling: Any) -> Reply:
    [reply] = engine.generate([request(text=text, **sampling)])
    return reply


# -- what is sent and read ----------------------------------------------------------------------------


def test_a_reply_comes_back_with_the_tokens_that_the_server_counted(engine, chat_server, says):
    chat_server.script = [says("I am well")]
    made = engine()
    assert one(made) == Reply("turn0", "I am well", "stop", prompt_tokens=4, reply_tokens=3)
    assert made.counts == {"replies": 1, "errors": 0, "prompt_tokens": 4, "reply_tokens": 3}
    assert chat_server.paths == ["/v1/chat/completions"]


def test_the_sampling_the_seed_and_the_options_are_sent(engine, chat_server):
    one(engine(options={"user": "me"}), top_p=0.9, stop=("\n", "END"))
    assert chat_server.bodies == [
        {
            "model": "big",
            "messages": [{"role": "user", "content": "how do you do"}],
            "temperature": 0.5,
            "max_tokens": 7,
            "seed": 0,
            "top_p": 0.9,
            "stop": ["\n", "END"],
            "user": "me",
        }
    ]


def test_an_option_that_is_null_leaves_a_field_out(engine, chat_server):
    one(engine(options={"temperature": None, "seed": None}))
    assert not {"temperature", "seed"} & chat_server.bodies[0].keys()


def test_replies_stand_in_the_order_of_the_requests_whatever_comes_first(engine, chat_server, says):
    chat_server.reply = lambda body: says(
        body["messages"][0]["content"], after_s=0.2 if "0" in body["messages"][0]["content"] else 0.0
    )
    replies = engine().generate([request(n, f"number {n}") for n in range(6)])
    assert [r.text for r in replies] == [f"number {n}" for n in range(6)]
    assert [r.turn_id for r in replies] == [f"turn{n}" for n in range(6)]


def test_results_of_tools_go_as_messages_that_every_server_takes(engine, chat_server):
    said = (Message("system", "s"), Message("user", "u"), Message("assistant", "a"), Message("tool", "42"))
    engine().generate([Request("t", "judge", said, SamplingParams(), 0)])
    assert [m["role"] for m in chat_server.bodies[0]["messages"]] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("theirs", "ours"), [("stop", "stop"), (None, "stop"), ("length", "length"), ("content_filter", "error")]
)
def test_finish_reasons_are_mapped(engine, chat_server, says, theirs, ours):
    chat_server.script = [says("text", finish=theirs)]
    reply = one(engine())
    assert reply.finish == ours
    assert ("content_filter" in reply.detail) == (ours == "error")


def test_a_stop_string_that_the_server_left_in_is_cut_off(engine, chat_server, says):
    chat_server.script = [says("one END two")]
    assert one(engine(), stop=("END",)).text == "one "


def test_a_server_that_counts_no_tokens_gives_zeros(engine, chat_server, says):
    chat_server.script = [says("text", usage=False)]
    assert (one(engine()).prompt_tokens, one(engine()).reply_tokens) == (0, 1)


def test_a_model_that_wants_another_name_for_the_token_limit_gets_it(engine, chat_server, says):
    words = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    chat_server.script = [says(status=400, error={"message": words, "code": "unsupported_parameter"})]
    made = engine()
    assert [one(made).text, one(made).text] == ["yes", "yes"]
    assert ["max_completion_tokens" in body for body in chat_server.bodies] == [False, True, True]


# -- tried again --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 529])
def test_what_may_pass_is_tried_again(engine, chat_server, says, status):
    chat_server.script = [says(status=status, error="busy")] * 3
    made = engine(retries=3)
    assert one(made).text == "yes"
    assert made.client.num_tries == len(chat_server.bodies) == 4


def test_a_broken_connection_a_page_of_html_and_half_an_answer_are_tried_again(engine, chat_server, says):
    chat_server.script = [
        says("a long reply", drop=True),
        says(raw=b"<html>Bad gateway</html>"),
        says(raw=b'{"choices": []}'),
        says(raw=b'{"choices": [{"message": {"content": 7}}]}'),
    ]
    assert one(engine()).text == "yes"
    assert len(chat_server.bodies) == 5


def test_a_try_that_hangs_ends_after_its_time_and_is_tried_again(engine, chat_server, says):
    chat_server.script = [says(after_s=30.0)]
    began = time.monotonic()
    assert one(engine(timeout_s=0.3)).text == "yes"
    assert 0.3 <= time.monotonic() - began < 5


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_the_pause_that_a_server_asks_for_is_kept_by_all(engine, chat_server, says, form):
    value = "1" if form == "seconds" else formatdate(time.time() + 3, usegmt=True)
    chat_server.script = [says(status=429, error="slow down", headers={"Retry-After": value})]
    made = engine(max_concurrent=1)
    made.generate([request(n) for n in range(2)])
    first, *later = chat_server.times
    assert all(at - first >= 0.9 for at in later)


def test_a_pause_beyond_all_patience_ends_the_run_at_once(engine, chat_server, says):
    chat_server.script = [says(status=429, error="tomorrow", headers={"Retry-After": "86400"})]
    with pytest.raises(RunError, match="86400 s"):
        one(engine())
    assert len(chat_server.bodies) == 1


def test_a_used_up_quota_is_not_waited_for(engine, chat_server, says):
    error = {"message": "You exceeded your current quota", "code": "insufficient_quota"}
    chat_server.script = [says(status=429, error=error)]
    with pytest.raises(RunError, match="exceeded your current quota"):
        one(engine())
    assert len(chat_server.bodies) == 1


def test_pauses_grow(engine, chat_server, says):
    chat_server.script = [says(status=500, error="x")] * 5
    endpoint = Endpoint(url=chat_server.url, retries=5)
    made = EndpointEngine(endpoint, "big", pause_s=0.05)
    one(made)
    made.close()
    # At least half of 0.05 · (1 + 2 + 4 + 8 + 16) s, less what the first try lost on its way; equal pauses
    # would be 0.25 s.
    assert chat_server.times[-1] - chat_server.times[0] >= 0.5


# -- limits -------------------------------------------------------------------------------------------


def test_no_more_requests_are_in_flight_than_allowed(engine, chat_server, says):
    chat_server.reply = lambda body: says(after_s=0.1)
    engine(max_concurrent=3).generate([request(n) for n in range(12)])
    assert chat_server.most_at_once == 3


def test_no_more_tries_start_in_a_minute_than_allowed(engine, chat_server, says):
    chat_server.script = [says(status=500, error="x")]
    engine(per_minute=2, minute_s=1.0).generate([request(n) for n in range(5)])
    times = chat_server.times
    assert len(times) == 6  # a retry counts
    # The last pair starts two "minutes" after the first one, less what that one lost on its way.
    assert times[-1] - times[0] >= 1.2


# -- given up -----------------------------------------------------------------------------------------


def test_a_refusal_ends_the_run_with_the_servers_words_and_without_the_key(
    engine, chat_server, says, monkeypatch
):
    monkeypatch.setenv("THE_KEY", KEY)
    chat_server.script = [says(status=401, error={"message": f"Incorrect API key provided: {KEY}."})]
    with pytest.raises(RunError, match=r"refuses \(401\): Incorrect API key provided: \*\*\*") as told:
        one(engine(key_env="THE_KEY"))
    assert chat_server.keys == [f"Bearer {KEY}"]
    assert KEY not in str(told.value)
    assert "key_env" in told.value.fix


def test_a_server_that_is_not_there_ends_the_run_after_all_tries(engine):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(RunError, match="doesn't answer; the last of 3 tries: ConnectError"):
        one(engine(url=url, retries=2))


def test_one_request_that_is_never_answered_beside_others_is_an_error_of_its_episode(
    engine, chat_server, says
):
    bad = says(status=500, error="this one breaks me", after_s=0.3)
    chat_server.reply = lambda body: bad if "poison" in body["messages"][0]["content"] else says("fine")
    replies = engine(retries=1).generate([request(0, "poison"), request(1), request(2)])
    assert [r.finish for r in replies] == ["error", "stop", "stop"]
    assert "this one breaks me" in replies[0].detail


@pytest.mark.parametrize(
    "error",
    [
        {"message": "This model's maximum context length is 4096 tokens. However, you requested 5000"},
        {"message": "too big", "code": "context_length_exceeded"},
        {"message": "the request exceeds the available context size", "type": "exceed_context_size_error"},
        "input is too long for this model",
    ],
)
def test_a_prompt_that_does_not_fit_there_is_prompt_too_long(engine, chat_server, says, error):
    chat_server.script = [says(status=400, error=error)]
    assert one(engine()).finish == "prompt_too_long"


def test_a_prompt_that_a_filter_refuses_is_an_error_of_its_episode(engine, chat_server, says):
    error = {"message": "The response was filtered", "code": "content_filter"}
    chat_server.script = [says(status=400, error=error)]
    reply = one(engine())
    assert reply.finish == "error" and "content filter" in reply.detail


def test_a_redirect_is_not_followed_with_the_key(engine, chat_server, says, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    chat_server.script = [says(status=307, error="moved", headers={"Location": "http://127.0.0.1:1/v1"})]
    with pytest.raises(RunError, match=r"refuses \(307\)"):
        one(engine())


# -- stopping -----------------------------------------------------------------------------------------


def test_a_stop_that_is_asked_for_is_heard_while_replies_are_waited_for(engine, chat_server, says):
    class Stopped(Exception):
        pass

    asked = threading.Event()

    def check() -> None:
        if asked.is_set():
            raise Stopped

    chat_server.reply = lambda body: says(after_s=30.0)
    threading.Timer(0.2, asked.set).start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        engine(check, timeout_s=60.0).generate([request(n) for n in range(3)])
    assert time.monotonic() - began < 5


def test_closing_cancels_what_is_waited_for(engine, chat_server, says):
    chat_server.reply = lambda body: says(after_s=30.0)
    made = engine(timeout_s=60.0)
    future = made.submit(request())
    time.sleep(0.1)
    made.close()
    assert future.cancelled()


# -- keys ---------------------------------------------------------------------------------------------


def test_without_a_key_no_key_is_sent(engine, chat_server):
    one(engine())
    assert chat_server.keys == [None]


def test_the_usual_variable_is_used_on_this_machine_and_over_https_only(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    urls = ("http://localhost:8000/v1", "http://[::1]/v1", "https://api.openai.com/v1", "http://elsewhere/v1")
    assert [find_key(Endpoint(url=url)) for url in urls] == [KEY, KEY, KEY, None]
    assert find_key(Endpoint(url="http://elsewhere/v1", key_env="OPENAI_API_KEY")) == KEY


def test_a_named_variable_that_is_not_set_is_an_error_before_anything_is_sent(monkeypatch):
    monkeypatch.delenv("THE_KEY", raising=False)
    with pytest.raises(RunError, match="environment variable THE_KEY"):
        EndpointEngine(Endpoint(url="http://localhost/v1", key_env="THE_KEY"), "big")


@pytest.mark.parametrize("name", ["THE_KEY", None])
def test_what_can_not_be_a_key_is_refused_without_showing_it(monkeypatch, name):
    bad = "secret\nwith a line break"
    monkeypatch.setenv(name or "OPENAI_API_KEY", bad)
    with pytest.raises(RunError) as told:
        find_key(Endpoint(url="http://localhost/v1", key_env=name))
    assert "secret" not in str(told.value)


def test_a_reply_that_repeats_the_key_is_kept_without_it(engine, chat_server, says, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    chat_server.script = [says(f"your key is {KEY}")]
    assert one(engine()).text == "your key is ***"
