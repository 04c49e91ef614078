from __future__ import annotations

import pytest

from streamrl.envs.dataset_order import DatasetIndex, EpochOrder, epoch_permutation
from streamrl.envs.problem_cursor import ProblemCursor
from streamrl.stream.records import EnvProgress


def test_every_epoch_has_each_problem_once_in_an_order_of_its_own():
    orders = [
        epoch_permutation(seed, epoch, 50).tolist() for seed in (0, 1, -1) for epoch in range(3)
    ]
    assert all(sorted(made) == list(range(50)) for made in orders)
    assert len({tuple(made) for made in orders}) == 9


def test_an_order_follows_from_seed_and_epoch_and_stays_what_it_is():
    """Written down once: a run of today is to go on tomorrow, under another numpy."""
    assert (
        epoch_permutation(7, 0, 8).tolist() == PINNED[0]
        and epoch_permutation(7, 1, 8).tolist() == PINNED[1]
    )
    assert epoch_permutation(2**64 + 7, 1, 8).tolist() == epoch_permutation(7, 1, 8).tolist()


PINNED = [[1, 6, 5, 2, 4, 7, 0, 3], [1, 4, 3, 2, 6, 5, 0, 7]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_replicas_come_to_the_same_by_their_numbers(world_size: int):
    """Four epochs of ten problems, taken by ProblemCursor as an env does, whatever the pace of
    each.
    """
    epochs = EpochOrder(3, 10)
    for rank in range(world_size):
        cursor = ProblemCursor(EnvProgress(producer=f"x-{rank}", next_problem=rank), world_size)
        posed: dict[int, list[int]] = {}
        while (number := cursor.next()) < 40:
            place = epochs(number)
            posed.setdefault(place.epoch, []).append(place.problem)
        expected: dict[int, list[int]] = {}
        for epoch in range(4):
            order = epoch_permutation(3, epoch, 10).tolist()
            mine = [order[at] for at in range(10) if (10 * epoch + at) % world_size == rank]
            if mine:
                expected[epoch] = mine
        assert posed == expected


def test_a_number_is_a_place_at_any_time():
    epochs = EpochOrder(5, 3)
    numbers = [8, 0, 5, 8, 2, 100, 1]
    assert [epochs(number) for number in numbers] == [
        EpochOrder(5, 3)(number) for number in numbers
    ]
    assert epochs(8) == DatasetIndex(2, int(epoch_permutation(5, 2, 3)[2]))
