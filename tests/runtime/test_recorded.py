"""A recorded episode is shown whole, whatever its keys and replies hold."""

from __future__ import annotations

import pytest

from masflow.runtime.recorded import place_text, printable, recorded_graph
from masflow.trace import EpisodeKey, Step, Trajectory, Turn

KEY = EpisodeKey(0, "eval", 0, 0, "task0", 0)


@pytest.mark.parametrize(
    ("key", "shown", "label"),
    [
        ("x", "[x]", "[x]"),
        (3, "[3]", "[3]"),
        ("ü漢🎉", "[ü漢🎉]", "[ü漢🎉]"),
        ("a\nb\x1b[31m\0", r"[a\nb\x1b[31m\x00]", r"[a\nb\x1b[31m\x00]"),
        ('"]<b>&#quot;', '["]<b>&#quot;]', "[&quot;]&lt;b>&amp;&#35;quot;]"),
    ],
)
def test_a_key_breaks_neither_a_line_nor_a_drawing(key, shown, label):
    step = Step("", "a", 1, key)
    assert place_text(step) == f"a {shown}"
    turn = Turn("t", (step,), "a", "a", "a", "policy", 1, (), "", None, True, "ok")
    drawn = recorded_graph(Trajectory(KEY, {}, (turn,), (), "ok", "", {}))
    assert f'  t0(["a {label}"])' in drawn.splitlines()


def test_what_a_terminal_would_obey_is_spelled_out_and_lines_stay():
    assert printable("red\n\t\x1b[31mé\x07") == "red\n\t\\x1b[31mé\\x07"
