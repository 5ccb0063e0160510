"""The plan of m_ask as a list of steps, and the one edit that the updater may make."""

Step = dict[str, str]


def edit(steps: list[Step], change: dict) -> list[Step]:
    """Replace the step that `change` numbers (from 1), or add one when it names none or a new one."""
    step = {"question": change["question"], "answer": change["answer"]}
    number = change["step"]
    if number is None or not 1 <= number <= len(steps):
        return [*steps, step]
    return [*steps[: number - 1], step, *steps[number:]]
