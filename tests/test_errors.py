"""The one boundary around users' code, and the nearest of known words."""

from masflow.errors import boundary, closest


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_whose_own_text_fails_is_still_one_error_of_the_user():
    with boundary("rewards/x.py:f") as caught:
        raise Mute
    assert caught.error == "rewards/x.py:f: Mute: (its message can't be read)"


def test_only_the_first_line_of_a_message_is_kept():
    with boundary("f") as caught:
        raise ValueError("first\nsecond")
    assert caught.error == "f: ValueError: first"
    assert "second" in caught.detail


def test_swapped_letters_are_nearer_than_another_letter():
    assert closest("gpro", ["grpo", "gspo", "ppo"]) == closest("gpro", ["ppo", "gspo", "grpo"]) == "grpo"
    assert closest("grppo", ["grpo", "gspo", "ppo"]) == "grpo"
    assert closest("xyz", ["grpo", "gspo", "ppo"]) is None
