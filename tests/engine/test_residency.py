"""Which models are in memory, by a clock that the test moves: bounded waits, few loads, idle ones first."""

import pytest

from scorepool.engine.residency import MIN_LINGER_S, Residency, Resident

TURN_S = 10.0


def share(*names: str, room: int = 1) -> tuple[Residency, dict[str, Resident]]:
    """Return models of one byte each, of which `room` fit at once and the first ones are loaded."""
    residency = Residency(room, TURN_S)
    residents = {name: Resident(size_bytes=1) for name in names}
    residency.residents += residents.values()
    for resident in list(residents.values())[:room]:
        resident.note_load(0.0, 0.5)
    return residency, residents


def load(residency: Residency, resident: Resident, now_s: float, load_s: float = 0.5) -> list[Resident]:
    """Load as the engine does, and return what was dropped."""
    dropped = residency.in_the_way(resident)
    for other in dropped:
        assert not other.is_computing
        other.is_loaded = False
    resident.note_load(now_s, load_s)
    return dropped


def test_a_model_for_which_there_is_room_is_loaded_at_once():
    residency, models = share("a", "b", room=1)
    residency.memory_bytes = 2
    models["a"].note_work(True, True, 0.0)
    models["b"].note_work(False, True, 0.0)
    assert residency.may_take_work(models["b"], 0.0)
    assert residency.in_the_way(models["b"]) == []


def test_an_idle_model_stays_for_as_long_as_its_load_took_and_then_makes_room():
    residency, models = share("a", "b")
    models["b"].note_work(False, True, 1.0)
    models["a"].note_work(True, True, 1.0)
    models["a"].note_work(False, False, 2.0)
    assert not residency.may_take_work(models["b"], 2.0)
    assert residency.may_take_work(models["a"], 2.4)
    assert residency.changes_in_s(2.0) == pytest.approx(0.5)
    assert residency.may_take_work(models["b"], 2.5)
    assert not residency.may_take_work(models["a"], 2.5)
    models["a"].load_s = 0.0
    assert residency.changes_in_s(2.0) == pytest.approx(MIN_LINGER_S)


def test_a_busy_model_takes_no_new_work_after_its_turn_and_ends_what_runs_before_it_is_dropped():
    residency, models = share("a", "b")
    models["a"].note_work(True, True, 1.0)
    models["b"].note_work(False, True, 1.0)
    assert residency.may_take_work(models["a"], TURN_S - 0.1)
    assert not residency.may_take_work(models["a"], TURN_S)
    assert not residency.may_take_work(models["b"], TURN_S)  # what runs is not over
    models["a"].note_work(False, True, TURN_S + 1)  # it is, and new work waits
    assert residency.may_take_work(models["b"], TURN_S + 1)
    assert load(residency, models["b"], TURN_S + 2) == [models["a"]]
    models["a"].note_work(False, True, TURN_S + 2)
    assert residency.changes_in_s(TURN_S + 2) == pytest.approx(TURN_S)  # now it is the other's turn


def test_without_a_model_in_line_nobody_stops():
    residency, models = share("a", "b")
    models["a"].note_work(True, True, 1.0)
    assert residency.may_take_work(models["a"], 100 * TURN_S)
    assert residency.changes_in_s(0.0) is None


def test_the_least_recently_used_idle_model_is_dropped_first():
    residency, models = share("a", "b", "c", "d", room=3)
    models["a"].note_work(True, True, 5.0)
    for name, used_at in (("b", 4.0), ("c", 3.0)):
        models[name].note_work(True, True, used_at)
        models[name].note_work(False, False, used_at)
    models["d"].note_work(False, True, 6.0)
    assert residency.in_the_way(models["d"]) == [models["c"]]
    models["d"].size_bytes = 3
    assert residency.in_the_way(models["d"]) == [models["c"], models["b"], models["a"]]


def test_models_are_loaded_in_the_order_in_which_they_began_to_wait():
    residency, models = share("a", "b", "c")
    models["c"].note_work(False, True, 1.0)
    models["b"].note_work(False, True, 2.0)
    assert residency.may_take_work(models["c"], 3.0)
    assert not residency.may_take_work(models["b"], 3.0)
    load(residency, models["c"], 3.0)
    assert residency.may_take_work(models["b"], 3.0 + TURN_S)


@pytest.mark.parametrize("num_models", [2, 3])
def test_models_that_always_have_work_each_wait_for_one_turn_of_the_others_at_most(num_models: int):
    """Loads take no more of the time than one a turn."""
    residency, models = share(*"abc"[:num_models])
    load_s, job_s, now_s, num_loads = 2.0, 0.7, 0.0, 0
    began_to_wait = dict.fromkeys(models, 0.0)
    waits_s = []
    while now_s < 1000:
        for name, model in models.items():
            model.note_work(False, True, now_s)
            if not residency.may_take_work(model, now_s):
                continue
            if not model.is_loaded:
                for other in load(residency, model, now_s + load_s, load_s):
                    began_to_wait[next(key for key, one in models.items() if one is other)] = now_s
                waits_s.append(now_s + load_s - began_to_wait[name])
                now_s, num_loads = now_s + load_s, num_loads + 1
            now_s += job_s
        now_s += 0.01
    assert max(waits_s) <= (num_models - 1) * (TURN_S + load_s + 2 * job_s) + load_s
    assert num_loads <= 1000 / TURN_S + 1
