"""Refusals name the value, the choices and the nearest one."""

from codegen.errors import nearest, unknown


def test_unknown_names_value_choices_and_nearest() -> None:
    message = str(unknown("arch", "sm08", ["host", "sm80"]))
    assert message == "arch is 'sm08', but must be one of host, sm80; did you mean sm80?"


def test_nothing_is_suggested_for_a_word_that_is_far_from_all() -> None:
    assert nearest("banana", ["host", "sm80"]) == ""
