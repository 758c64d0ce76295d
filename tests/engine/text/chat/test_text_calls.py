"""Calls that are written as text are found in time that grows with the text."""

import time

import pytest

from scorepool.engine.text.chat.text_calls import TextCalls, parse_text_calls

ARROWS = '[TOOL_CALL]{tool => "look", args => {--place "Bern"}%s}[/TOOL_CALL]'


@pytest.mark.parametrize("text", ["[Calling tool:" + " " * 60_000 + "!", ARROWS % ("}" + " " * 60_000 + "x")])
def test_spaces_take_linear_time(text: str):
    """They took half a minute. A second is a hundred times what they take."""
    started_at = time.process_time()
    assert TextCalls().read(text.encode()) != "calls"
    assert time.process_time() - started_at < 1


@pytest.mark.parametrize("spaces", ["", " ", ",", " , "])
def test_a_call_with_arrows_may_end_with_a_comma(spaces: str):
    [call] = parse_text_calls(ARROWS % spaces, None)
    assert call == {"name": "look", "arguments": {"place": "Bern"}}
