"""The per-token columns of a sequence: every value keeps to its token through extend, slice and drop."""

from scorepool.engine.sequence import Sampling, Sequence, TokenColumns


def columns_of(*tokens: int, num_prompt: int = 0) -> TokenColumns:
    """Columns whose values name their token; `num_prompt` leading tokens have no sampled logprob."""
    return TokenColumns(
        logprobs=[-float(token) for token in tokens],
        top_ids=[[token] for token in tokens],
        top_logprobs=[[-float(token)] for token in tokens],
        ranks=list(tokens),
        sampled_logprobs=[-float(token) for token in tokens[num_prompt:]],
    )


def test_extended_columns_hold_the_entries_of_both():
    columns = columns_of(1, 2)

    columns.extend(columns_of(3))

    assert columns == columns_of(1, 2, 3)
    assert columns.entropies == []  # nobody asked for them


def test_a_slice_takes_the_same_tokens_from_every_column():
    whole = columns_of(1, 2, 3, 4, num_prompt=2)

    assert whole[1:3] == columns_of(2, 3, num_prompt=1)
    assert whole[3:] == columns_of(4)
    assert whole[:1] == columns_of(1, num_prompt=1)
    assert whole[4:] == TokenColumns()


def test_dropping_the_last_tokens_drops_them_from_every_column():
    columns = columns_of(1, 2, 3, num_prompt=1)

    columns.drop_last(2)
    columns.drop_last(0)

    assert columns == columns_of(1, num_prompt=1)


def test_the_first_token_has_an_entry_without_values_in_each_column_that_is_asked_for():
    asks_for_all = Sequence(token_ids=[7], score_from=0, top_logprobs=2, rank=True, entropy=True)
    asks_for_little = Sequence(token_ids=[7], score_from=0, sampling=Sampling(max_tokens=1))

    for sequence in (asks_for_all, asks_for_little):
        sequence.append_unpredicted()

    assert asks_for_all.columns == TokenColumns(
        logprobs=[None], top_ids=[[]], top_logprobs=[[]], ranks=[None], entropies=[None]
    )
    assert asks_for_little.columns == TokenColumns(logprobs=[None])
