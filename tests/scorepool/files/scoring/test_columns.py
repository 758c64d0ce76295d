"""What is in a column is taken as it is, or named as the fault of its row."""

import pytest

from scorepool.files.scoring.columns import PromptColumn, ScoreColumns


@pytest.mark.parametrize("token_id", [-1, 2**31, 2**63, 2**64, 10**30])
def test_an_integer_that_is_no_token_id_is_a_fault_of_its_row(token_id: int):
    sentence = f"column 'a' has the token id {token_id}: expected 0 to 2147483647"
    with pytest.raises(ValueError, match=sentence):
        PromptColumn("a").prompt({"a": [0, token_id]})
    with pytest.raises(ValueError, match=sentence):
        ScoreColumns("a", "b").item({"a": [token_id], "b": [1]})
    assert PromptColumn("a").prompt({"a": [0, 2**31 - 1]}) == {"prompt": [0, 2**31 - 1]}
