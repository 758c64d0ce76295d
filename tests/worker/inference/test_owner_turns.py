"""Owners take turns by what their turns cost, whatever they have waiting."""

from itertools import islice

from scorepool.worker.inference.owner_turns import MAX_CLOCKS, OwnerTurns


def taken(turns: OwnerTurns[str], cost: dict[str, float], num: int) -> str:
    """Take turns; each is charged what the owner's turns cost. Jobs are named after their owners."""
    order = []
    for job in islice(iter(turns.take, None), num):
        turns.charge(job[0], cost[job[0]])
        order.append(job)
    return "".join(order)


def test_owners_alternate_and_each_owner_s_jobs_keep_their_order():
    turns: OwnerTurns[str] = OwnerTurns()
    for job in ("a1", "a2", "a3", "b1", "b2"):
        turns.put(job[0], job)

    assert taken(turns, {"a": 1, "b": 1}, 9) == "a1b1a2b2a3"
    assert turns.take() is None


def test_an_owner_with_small_jobs_gets_as_much_done_as_one_with_large_ones():
    turns: OwnerTurns[str] = OwnerTurns()
    for _ in range(5):
        turns.put("a", "a")
    for _ in range(40):
        turns.put("b", "b")

    assert taken(turns, {"a": 10, "b": 1}, 33) == "ab" + "b" * 9 + "a" + "b" * 10 + "a" + "b" * 10


def test_a_new_owner_has_the_next_turn_whatever_others_have_waiting():
    turns: OwnerTurns[str] = OwnerTurns()
    for _ in range(1000):
        turns.put("a", "a")
        turns.put("b", "b")
    taken(turns, {"a": 5, "b": 3}, 100)
    turns.put("c", "c")

    assert "c" in taken(turns, {"a": 5, "b": 3, "c": 1}, 3)


def test_an_owner_that_was_away_gets_no_turns_for_it():
    turns: OwnerTurns[str] = OwnerTurns()
    for _ in range(100):
        turns.put("a", "a")
    taken(turns, {"a": 1}, 50)
    for _ in range(50):
        turns.put("b", "b")

    order = taken(turns, {"a": 1, "b": 1}, 20)

    assert order.count("b") == 10


def test_a_job_that_goes_on_waits_behind_the_others_of_its_owner_and_of_others():
    turns: OwnerTurns[str] = OwnerTurns()
    turns.put("a", "long")
    turns.put("a", "short")
    turns.put("b", "other")
    order = []
    for _ in range(6):
        job = turns.take()
        assert job is not None
        order.append(job)
        turns.charge("b" if job == "other" else "a", 1)
        if job == "long":
            turns.put("a", job)

    assert order == ["long", "other", "short", "long", "long", "long"]


def test_the_clocks_of_owners_that_left_are_dropped():
    turns: OwnerTurns[str] = OwnerTurns()
    for number in range(3 * MAX_CLOCKS):
        turns.put(f"owner {number}", "job")
        turns.take()
        turns.charge(f"owner {number}", 1)
        turns.put("a", "a")
        turns.take()
        turns.charge("a", 1)

    assert len(turns._clocks) <= MAX_CLOCKS
