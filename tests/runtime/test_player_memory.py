"""Episodes that nobody needs any more are gone at once, without a search for garbage."""

from __future__ import annotations

import gc
from collections.abc import Callable
from weakref import ref

from masflow.compiler.plan import Plan
from masflow.models.scripted import ScriptedEngine
from masflow.runtime.episodes import play
from masflow.runtime.player import Player
from masflow.trace import EpisodeKey

TALK = """
    name: talk
    roles: {speaker: {prompt: "Say a word."}}
    nodes:
      first: {role: speaker}
      count: {call: "fns.py:length", args: {text: "{{ first.text }}"}}
      second: {role: speaker, prompt: "Say {{ count }} words."}
    edges: [start -> first -> count -> second -> end]
    output: {said: "{{ second.text }}"}
"""


def test_an_episode_in_the_middle_leaves_no_garbage(compiled: Callable[..., Plan]):
    player = Player(compiled(TALK, {"fns.py": "def length(text: str) -> int:\n    return len(text)\n"}))
    engine = ScriptedEngine({"speaker": ["hello"]})
    state = player.start({}, EpisodeKey(0, "train", 1, 0, "t", 0))
    for request in player.advance(state):
        player.deliver(state, engine.generate([request])[0])
    player.advance(state)
    gc.collect()
    gc.disable()
    try:
        live = ref(state.live)
        del state
        assert live() is None
    finally:
        gc.enable()


def test_what_is_let_go_of_an_episode_that_ended_can_be_asked_again(compiled: Callable[..., Plan]):
    player = Player(compiled(TALK, {"fns.py": "def length(text: str) -> int:\n    return len(text)\n"}))
    state = player.start({}, EpisodeKey(0, "train", 1, 0, "t", 0))
    [one] = play(player, [state], ScriptedEngine({"speaker": ["hello"]}).generate)
    assert state.live is None
    assert player.finished(state)
    assert player.trajectory(state) == one
