"""Deltas pass in the order of the latest run, whatever is repeated, late or lost."""

from scorepool import wire
from scorepool.api.delta_order import DeltaOrder


def delta(first: int, count: int = 1, run: int = 1, sequence: int = 0) -> wire.TokenDelta:
    ids = list(range(first, first + count))
    return wire.TokenDelta(id="j", run=run, sequence=sequence, first=first, token_ids=ids, token_bytes=[b""] * count)


def test_deltas_after_a_gap_wait_until_it_is_filled():
    order = DeltaOrder()

    assert order.admit(delta(0, 3))
    assert not order.admit(delta(5, 2))
    assert order.missing == {0: 3}
    assert order.admit(delta(0, 2, sequence=1))  # another sequence has no gap
    assert order.admit(delta(2, 4))
    assert order.missing == {}
    assert order.admit(delta(6))


def test_a_repeated_delta_passes_for_the_reader_drops_what_it_has():
    order = DeltaOrder()

    assert [order.admit(delta(0, 3)), order.admit(delta(0, 3)), order.admit(delta(3))] == [True, True, True]
    assert order.admit(delta(1))
    assert order.admit(delta(4))  # the repetition took nothing back


def test_a_later_run_begins_again_and_an_earlier_one_is_late():
    order = DeltaOrder()
    order.admit(delta(0, 5, run=1))
    order.admit(delta(9, 1, run=1))

    assert not order.admit(delta(1, run=2))
    assert order.missing == {0: 0}
    assert order.admit(delta(0, 2, run=2))
    assert not order.admit(delta(5, run=1))
    assert not order.admit(delta(5, run=2))
    assert order.admit(delta(2, run=2))


def test_a_worker_of_the_previous_release_names_no_run():
    order = DeltaOrder()

    assert [order.admit(delta(0, 2, run=0)), order.admit(delta(2, run=0))] == [True, True]
    assert order.admit(delta(0, run=7))  # its job went to a worker of this release
    assert order.admit(delta(0, 2, run=0))  # and back: the reader compares the tokens


def test_a_reader_may_have_tokens_of_a_run():
    order = DeltaOrder(run=3, counts=[4, 0])

    assert order.admit(delta(4, run=3))
    assert not order.admit(delta(6, run=2))
    assert not order.admit(delta(5, run=4))
    assert order.missing == {0: 0}


def test_other_weights_than_those_that_computed_what_has_passed_do_not_agree():
    order = DeltaOrder()

    assert order.agrees(None)  # later tokens of a sequence, and those of the previous release, name none
    assert [order.agrees("a"), order.agrees(None), order.agrees("a"), order.agrees("b")] == [True, True, True, False]
    order.begin_again()  # with a later run: what has passed is still of the first weights
    assert not order.agrees("b")
