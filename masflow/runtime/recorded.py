"""The graph that an episode turned out to be: its turns, and which came right before which."""

from __future__ import annotations

import re

from masflow.trace import Step, Trajectory, Turn

__all__ = ["place_text", "printable", "recorded_graph"]


def recorded_graph(trajectory: Trajectory) -> str:
    """A Mermaid flowchart of one episode.

    An arrow leads to a turn from each of its immediate predecessors in happened-before order; the turns of an
    inner episode stand in a box of its own. Of a workflow that is a function, this is all the graph there is.
    """
    name = {turn.id: f"t{i}" for i, turn in enumerate(trajectory.turns)}
    lines = ["flowchart TD", "  start((start))", "  end_((end))"]
    boxes: dict[str, list[Turn]] = {}
    for turn in trajectory.turns:
        box = "/".join(map(place_text, turn.path[:-1]))
        boxes.setdefault(box, []).append(turn)
    for i, (box, turns) in enumerate(boxes.items()):
        pad = "    " if box else "  "
        lines += [f'  subgraph b{i}["{_quoted(box)}"]'] if box else []
        lines += [f'{pad}{name[turn.id]}(["{_label(turn)}"])' for turn in turns]
        lines += ["  end"] if box else []
    followed = {before for ids in trajectory.predecessors.values() for before in ids}
    for turn in trajectory.turns:
        before = [name[i] for i in trajectory.predecessors.get(turn.id, ()) if i in name] or ["start"]
        lines += [f"  {source} --> {name[turn.id]}" for source in before]
    lines += [f"  {name[t.id]} --> end_" for t in trajectory.turns if t.id not in followed]
    return "\n".join(lines)


def _label(turn: Turn) -> str:
    step = turn.step
    word = place_text(step)
    word += f" call {step.model_call + 1}" if step.model_call else ""
    word += f" attempt {step.attempt + 1}" if step.attempt else ""
    return _quoted(word if turn.outcome == "ok" else f"{word}: {turn.outcome}")


def place_text(step: Step) -> str:
    """`search #2 [0]`: a node, its visit from the second on, and its item or key."""
    visit = f" #{step.visit}" if step.visit > 1 else ""
    return step.node + visit + (f" [{printable(str(step.item), '')}]" if step.item is not None else "")


def printable(text: str, kept: str = "\n\t") -> str:
    """A text in which what a terminal would obey is spelled out; a key or a reply may hold anything.

    Args:
        kept: what stays as it is all the same.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode("ascii") for c in text
    )


def _quoted(text: str) -> str:
    text = text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return re.sub(r"#(?=\w+;)", "&#35;", text)  # Mermaid has entities of its own: #quot;
