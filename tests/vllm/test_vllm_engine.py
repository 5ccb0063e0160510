"""vLLM speaks as Hugging Face's model does: log-probs, seeds, ends, windows, conversations, sleep."""

from __future__ import annotations

import pytest

from masflow.errors import RunError
from masflow.models.engine import Request
from masflow.trace import Message

TOLERANCE = 1e-4
"""Nats between vLLM and Hugging Face in float32."""


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def pair(request, side):
    return side(request.param)


def gaps(pair, requests):
    """Of each drawn token's log-prob, to Hugging Face's at the temperature that it was drawn at."""
    found = []
    for one in requests:
        row = pair.engine.experience.get(one.turn_id)
        expected = pair.expected(one.policy, row.prompt_ids, row.reply_ids, one.sampling.temperature or 1.0)
        found += [abs(a - b) for a, b in zip(row.logprobs, expected, strict=True)]
    return found


@pytest.mark.parametrize("temperatures", [(1.0,), (0.7,), (0.0,), (0.0, 0.5, 1.0, 1.3)])
def test_logprobs_are_those_of_the_distribution_sampled_from(pair, ask, temperatures):
    requests = [
        ask(n, "what is the colour of " + "sky " * n, temperature=temperatures[n % len(temperatures)])
        for n in range(12)
    ]
    pair.engine.generate(requests)
    found = gaps(pair, requests)
    assert len(found) > 50
    assert max(found) < TOLERANCE


def test_a_reply_is_its_seeds_whatever_is_drawn_beside_it(pair, ask):
    together = pair.engine.generate([ask(n) for n in range(8)])
    alone = [pair.engine.generate([ask(n)])[0] for n in range(8)]
    assert [r.text for r in alone] == [r.text for r in together]
    assert len({r.text for r in together}) > 4


def test_a_reply_ends_with_its_end_token_or_at_its_length(pair, ask):
    requests = [ask(n, max_tokens=64) for n in range(24)]
    replies = pair.engine.generate(requests)
    assert {r.finish for r in replies} == {"stop", "length"}
    for one, reply in zip(requests, replies, strict=True):
        ids = pair.engine.experience.get(one.turn_id).reply_ids
        assert (ids[-1] in pair.tokens.stop_ids) == (reply.finish == "stop")
        assert not pair.tokens.stop_ids & set(ids[:-1])
        assert reply.finish == "stop" or len(ids) == 64
        assert reply.reply_tokens == len(ids)


def test_a_stop_string_is_cut_from_the_text_and_stays_in_the_ids(pair, ask):
    requests = [ask(n, max_tokens=64, stop=("red", "two")) for n in range(24)]
    replies = pair.engine.generate(requests)
    stopped = 0
    for one, reply in zip(requests, replies, strict=True):
        ids = pair.engine.experience.get(one.turn_id).reply_ids
        whole = pair.tokens.decode(ids)
        assert not any(word in reply.text for word in ("red", "two"))
        if any(word in whole for word in ("red", "two")):
            stopped += 1
            before = pair.tokens.decode(ids[:-1])
            assert not any(word in before for word in ("red", "two")), "drawn on beyond the stop"
            assert reply.finish == "stop"
    assert stopped > 2
    assert max(gaps(pair, requests)) < TOLERANCE


def test_a_prompt_that_does_not_fit_is_told_and_never_cut(pair, ask):
    long = ask(100, "sky " * 700)
    first, second = pair.engine.generate([ask(0), long])
    assert first.finish in ("stop", "length")
    assert second.finish == "prompt_too_long" and "exceed the context 640" in second.detail
    assert pair.engine.experience.get("t100") is None


def test_a_conversation_goes_on_with_the_ids_that_were_drawn(pair, ask):
    first = ask(0, "say one")
    [reply] = pair.engine.generate([first])
    said = (*first.messages, Message("assistant", reply.text, "t0"), Message("user", "say two"))
    pair.engine.generate([Request("t1", "m", said, first.sampling, 5, parent="t0")])
    before, after = (pair.engine.experience.get(name) for name in ("t0", "t1"))
    assert after.prefix == before.num_tokens
    assert after.prompt_ids[: after.prefix] == before.prompt_ids + before.reply_ids
    assert max(gaps(pair, [Request("t1", "m", said, first.sampling, 5)])) < TOLERANCE


def test_long_prompts_that_share_a_prefix_have_right_logprobs(pair, ask):
    """The second and third find the first one's blocks in vLLM's cache."""
    shared = "what is the colour of sky " * 60
    for n in range(3):
        pair.engine.generate([ask(n, shared + "one two three"[: 3 + 4 * n])])
    requests = [ask(n, shared + "one two three"[: 3 + 4 * n]) for n in range(3)]
    assert max(gaps(pair, requests)) < TOLERANCE


def test_top_k_and_top_p_give_the_logprobs_of_what_is_left(pair, ask):
    """With one token left its log-prob is 0."""
    pair.engine.generate([ask(0, top_k=1)])
    assert all(abs(value) < 1e-6 for value in pair.engine.experience.get("t0").logprobs)


def test_a_probe_is_scored_at_temperature_one(pair):
    assert pair.gap("m") < TOLERANCE


def test_it_wakes_up_with_the_same_replies_and_does_not_speak_asleep(pair, ask):
    requests = [ask(n, temperature=0.0) for n in range(4)]
    before = pair.engine.generate(requests)
    pair.engine.sleep()
    with pytest.raises(RunError, match="sleeps"):
        pair.engine.generate(requests)
    pair.engine.wake()
    assert pair.engine.generate(requests) == before


def test_an_unknown_policy_is_told_with_the_known_ones(pair, ask):
    with pytest.raises(RunError, match="has no policy 'n'; it has: m"):
        pair.engine.generate([ask(0, policy="n")])
