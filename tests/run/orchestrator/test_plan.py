import pytest

from streamrl.run.orchestrator import plan
from streamrl.run.orchestrator.plan import (
    Abort,
    Exit,
    Kill,
    PartState,
    Start,
    backoff,
    decide,
    describe_exit,
    stop_limit_s,
    stop_order,
)


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "RESTART_LIMIT", 3)
    monkeypatch.setattr(plan, "BACKOFF_S", 0.5)


def ended(*ends: tuple[float, float, int]) -> PartState:
    return PartState(False, tuple(Exit(*end) for end in ends))


def test_envs_stop_first_and_the_broker_last():
    assert stop_order(["broker", "learner", "env-copy-0", "inference-0"]) == [
        ["env-copy-0"],
        ["learner", "inference-0"],
        ["broker"],
    ]


def test_what_does_not_run_is_started():
    assert decide(["learner", "buffer"], {"learner": PartState(True)}, 0.0) == [Start("buffer")]


def test_backoff_doubles_with_every_short_life_in_a_row_up_to_ten_seconds():
    ends: tuple[Exit, ...] = ()
    waits = []
    for _ in range(7):
        ends += (Exit(0.0, 1.0, 1),)
        waits.append(backoff(ends))
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_long_life_begins_the_row_anew():
    assert backoff((Exit(0, 1, 1), Exit(0, 1, 1), Exit(0, 3600, 1))) == 0.5
    assert backoff((Exit(0, 3600, 1), Exit(0, 1, 1))) == 1.0


def test_a_part_in_its_backoff_waits():
    observed = {"buffer": ended((10.0, 1.0, 1))}
    assert decide(["buffer"], observed, 10.4) == []
    assert decide(["buffer"], observed, 10.5) == [Start("buffer")]


def test_a_failed_transaction_that_comes_alone_is_answered_at_once():
    assert decide(["buffer"], {"buffer": ended((10.0, 60.0, 75))}, 10.0) == [Start("buffer")]
    assert backoff((Exit(0, 1, 75), Exit(0, 1, 75))) == 1.0


def test_more_ends_than_the_limit_within_the_window_end_the_run():
    often = [(float(t), 1.0, -9) for t in (10, 20, 30, 40)]
    [action] = decide(["buffer"], {"buffer": ended(*often)}, 60.0)
    assert isinstance(action, Abort)
    assert "4 times within 300 s" in action.reason and "SIGKILL" in action.reason
    # The first has left the window, and the part has done work since.
    worked = ended(*often[:2]).ends + tuple(
        end._replace(progressed=True) for end in ended(*often[2:]).ends
    )
    observed = {"buffer": PartState(False, worked)}
    assert decide(["buffer"], observed, 315.0) == [Start("buffer")]


def test_more_ends_in_a_row_than_the_limit_without_work_end_the_run():
    """As of a learner that is ready, and ends in its first step. Each life takes three minutes, so
    no two ends are within the same window.
    """
    slow = tuple(Exit(200.0 * n, 180.0, 9) for n in range(4))
    [action] = decide(["buffer"], {"buffer": PartState(False, slow)}, 1000.0)
    assert isinstance(action, Abort)
    assert "4 times in a row without having done any work, last with exit code 9" in action.reason
    for healthy in (slow[1]._replace(progressed=True), slow[1]._replace(lived_s=7200.0)):
        ends = (slow[0], healthy, *slow[2:])
        observed = {"buffer": PartState(False, ends)}
        assert decide(["buffer"], observed, 1000.0) == [Start("buffer")]


@pytest.mark.parametrize("code", [75, 3])
def test_a_part_for_which_alone_there_is_no_broker_ends_the_run(code: int):
    away = tuple(Exit(20.0 * n, 10.0, code, broker_answered=True) for n in range(4))
    [action] = decide(["buffer"], {"buffer": PartState(False, away)}, 1000.0)
    assert isinstance(action, Abort) and "although the broker answers" in action.reason
    back = (*away[1:], Exit(80.0, 60.0, code, progressed=True, broker_answered=True))
    observed = {"buffer": PartState(False, back)}
    assert decide(["buffer"], observed, 1000.0) == [Start("buffer")]


def test_a_part_that_hangs_is_ended_and_one_that_runs_is_not():
    observed = {
        "env-copy-0": PartState(True, (), "its loop last ran 61 s ago"),
        "buffer": PartState(True),
    }
    assert decide(["buffer", "env-copy-0"], observed, 0.0) == [
        Kill("env-copy-0", "its loop last ran 61 s ago")
    ]


@pytest.mark.parametrize("code", [75, 3])
def test_ends_for_want_of_a_broker_do_not_end_the_run_but_its_own_do(code: int):
    outage = ended(*((float(t), 1.0, code) for t in range(10, 60, 10)))
    assert decide(["buffer"], {"buffer": outage}, 61.0) == [Start("buffer")]
    [action] = decide(["broker"], {"broker": outage}, 61.0)
    assert isinstance(action, Abort)


@pytest.mark.parametrize(
    ("code", "word"), [(76, "identity"), (2, "settings"), (7, "model"), (11, "refuses")]
)
def test_what_a_restart_does_not_help_is_given_up_at_once(code: int, word: str):
    [action] = decide(["buffer"], {"buffer": ended((10.0, 1.0, code))}, 10.0)
    assert isinstance(action, Abort) and word in action.reason


GANG = ["learner", "learner-1"]


def test_a_gang_is_started_as_one_and_beside_the_others():
    assert decide([*GANG, "buffer"], {}, 0.0, GANG) == [
        Start("learner"),
        Start("learner-1"),
        Start("buffer"),
    ]
    running = dict.fromkeys([*GANG, "buffer"], PartState(True))
    assert decide([*GANG, "buffer"], running, 0.0, GANG) == []


def test_when_one_of_a_gang_ends_the_others_are_ended_and_then_all_started():
    observed = {"learner": PartState(True), "learner-1": ended((10.0, 60.0, -9))}
    reason = "learner-1 has ended, and they run together"
    assert decide(GANG, observed, 10.0, GANG) == [Kill("learner", reason)]
    observed["learner"] = ended((10.2, 60.2, -9))
    assert decide(GANG, observed, 10.4, GANG) == [], "in its back-off"
    assert decide(GANG, observed, 10.5, GANG) == [Start("learner"), Start("learner-1")]


def test_one_of_a_gang_that_hangs_takes_the_others_along():
    observed = {"learner": PartState(True), "learner-1": PartState(True, (), "it hangs")}
    assert decide(GANG, observed, 0.0, GANG) == [Kill("learner-1", "it hangs")]


def test_the_end_of_a_gang_is_that_of_the_one_that_gave_up_or_else_the_first():
    observed = {"learner": ended((10.0, 1.0, -6)), "learner-1": ended((10.5, 1.0, 7))}
    [action] = decide(GANG, observed, 20.0, GANG)
    assert isinstance(action, Abort) and action.name == "learner-1" and "model" in action.reason
    # Five times the broker was away, and the other one was ended for it.
    away = ended(*((float(t), 1.0, 75) for t in range(10, 60, 10)))
    followed = ended(*((t + 0.2, 1.2, -9) for t in range(10, 60, 10)))
    observed = {"learner": away, "learner-1": followed}
    assert decide(GANG, observed, 61.0, GANG) == [Start(name) for name in GANG]


def test_a_gang_has_done_work_if_one_of_its_parts_has():
    """Only the part of rank zero commits transactions, and another one ends first."""
    first = tuple(Exit(200.0 * n + 1, 180.0, -9, progressed=True) for n in range(5))
    second = tuple(Exit(200.0 * n, 180.0, 9) for n in range(5))
    observed = {"learner": PartState(False, first), "learner-1": PartState(False, second)}
    assert decide(GANG, observed, 2000.0, GANG) == [Start(name) for name in GANG]
    observed["learner"] = PartState(False, tuple(end._replace(progressed=False) for end in first))
    [action] = decide(GANG, observed, 2000.0, GANG)
    assert isinstance(action, Abort) and "5 times in a row" in action.reason


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (Exit(0, 1, 3), "exit code 3"),
        (Exit(0, 1, -15), "SIGTERM"),
        (Exit(0, 1, -200), "signal 200"),
        (Exit(0, 1, -9, killed=True, held_bytes=1 << 30), "SIGKILL"),
        (Exit(0, 1, -9), "SIGKILL (from the kernel, for lack of memory, or by hand)"),
        (
            Exit(0, 1, -9, held_bytes=15 << 30),
            "SIGKILL (from the kernel, for lack of memory, or by hand; it last held 15.0 GiB)",
        ),
    ],
)
def test_exits_in_words(end: Exit, said: str):
    assert describe_exit(end) == said


def test_a_learner_has_time_to_finish_a_long_step_when_it_is_stopped():
    """Killed after 15 s it would lose all steps since its last checkpoint."""
    assert stop_limit_s("learner") == stop_limit_s("learner-1") == 600
    for other in ("env-learner-0", "inference-0", "buffer", "broker", "learners"):
        assert stop_limit_s(other) == 15
