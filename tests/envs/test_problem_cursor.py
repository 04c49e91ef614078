from __future__ import annotations

from streamrl.envs.problem_cursor import ProblemCursor, resume_progress
from streamrl.stream.records import EnvProgress


def test_replica_i_of_n_takes_every_nth_problem():
    cursors = [
        ProblemCursor(EnvProgress(producer=f"copy-{i}", next_problem=i), 3) for i in range(3)
    ]
    assert [[cursor.next() for _ in range(3)] for cursor in cursors] == [
        [0, 3, 6],
        [1, 4, 7],
        [2, 5, 8],
    ]


def test_progress_is_what_is_published_and_what_is_open():
    cursor = ProblemCursor(EnvProgress(producer="copy-0", next_problem=0), 2)
    for _ in range(3):
        cursor.next()
    assert cursor.complete([2]) == EnvProgress(
        producer="copy-0", next_problem=6, open_problems=[0, 4], published_groups=1
    )


def test_another_number_of_replicas_begins_behind_all_that_was_posed():
    """Two replicas at 100 and 51 become three, in any order, then two again; whoever starts meets
    no number that another has had.
    """
    two = [
        EnvProgress(producer="x-0", next_problem=100, replicas=2),
        EnvProgress(producer="x-1", next_problem=51, open_problems=[49], replicas=2),
    ]
    first = resume_progress("x-1", 1, 3, two)
    assert first == EnvProgress(
        producer="x-1", next_problem=100, open_problems=[49], replicas=3, begins=100
    )
    went_on = EnvProgress(producer="x-1", next_problem=130, replicas=3, begins=100)
    assert resume_progress("x-2", 2, 3, [two[0], went_on]).next_problem == 101
    assert resume_progress("x-0", 0, 3, [two[0], went_on]).next_problem == 102
    three = [
        EnvProgress(producer=f"x-{i}", next_problem=n, replicas=3, begins=100)
        for i, n in ((0, 102), (1, 130), (2, 101))
    ]
    assert [resume_progress(f"x-{i}", i, 3, three) for i in range(3)] == three
    assert resume_progress("x-2", 2, 3, three[:2]).next_problem == 101  # the one that never wrote
    assert [resume_progress(f"x-{i}", i, 2, three).next_problem for i in range(2)] == [130, 131]


def test_the_same_number_of_replicas_goes_on_where_it_was():
    assert resume_progress("x-1", 1, 2, []) == EnvProgress(
        producer="x-1", next_problem=1, replicas=2
    )
    early = EnvProgress(producer="x-0", next_problem=40, replicas=2)
    assert (
        resume_progress("x-1", 1, 2, [early]).next_problem == 1
    )  # it starts late, and skips nothing
    known = EnvProgress(
        producer="x-0", next_problem=40, open_problems=[38], published_groups=19, replicas=2
    )
    assert resume_progress("x-0", 0, 2, [known]) == known
