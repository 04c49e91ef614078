from collections import deque
from pathlib import Path

import pytest

from bench import scaling
from bench.measure import markdown
from bench.stations import delayed
from bench.work import Shape, Source, run_file


def measured(point: int, rates: list[float], tokens: int = 100) -> scaling.Row:
    results = [
        {"rollouts_per_s": rate, "cpu_ms": {"buffer": 0.0625, "broker": 0.25}} for rate in rates
    ]
    return scaling.row(
        point, Shape(prompt=0, response=tokens), results, {"buffer": 128.0, "broker": 300.0}
    )


def test_a_table_as_documents_have_it():
    assert markdown(("", "rate"), [("ours", "1,000"), ("a", "2")]).splitlines() == [
        "|      |  rate |",
        "| ---- | ----: |",
        "| ours | 1,000 |",
        "| a    |     2 |",
    ]


def test_neighbours_in_time_are_compared():
    # a machine that is twice as fast in the second round; of three rounds the middle one counts
    rows = scaling.compared(
        [measured(1, [1000.0, 2000.0, 1000.0]), measured(10, [800.0, 1000.0, 900.0])], "rounds"
    )
    assert rows[0]["to_first"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert rows[1]["to_first"] == {"median": 0.8, "min": 0.5, "max": 0.9}
    assert rows[1]["rollouts_per_s"] == 900


def test_of_longer_responses_tokens_count():
    rows = [measured(100, [1000.0], tokens=100), measured(400, [200.0], tokens=400)]
    assert scaling.compared(rows, "tokens_per_round")[1]["to_first"]["median"] == 0.8


def test_a_point_that_failed_says_so_and_the_others_are_shown(tmp_path: Path):
    rows = scaling.compared(
        [
            {"point": 1, "failed": "bench: buffer ended"},
            measured(3, [500.0, 500.0]),
            measured(10, [250.0, 250.0]),
        ],
        "rounds",
    )
    lines = scaling.table({"envs": rows}).splitlines()
    assert (
        "failed" in lines[2] and "1.00" in lines[3] and "0.50" in lines[4] and "0.062" in lines[4]
    )
    scaling.draw({"envs": rows}, tmp_path / "docs" / "scaling.png")
    assert (tmp_path / "docs" / "scaling.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize("name", scaling.CURVES)
def test_every_point_is_a_run_that_can_be(name: str, tmp_path: Path):
    for point in scaling.CURVES[name].points:
        shape = scaling.CURVES[name].shape(point)
        run_file("r", tmp_path, shape)
        assert shape.batch % shape.group == 0 and shape.batch >= shape.group


def test_long_responses_come_in_batches_and_transactions_of_as_many_tokens():
    assert scaling.of_length(1024).batch == Shape().batch
    longest = scaling.of_length(32_768)
    # of 33,280 tokens; 786,432 to a transaction
    assert (longest.batch, longest.transaction_groups) == (8, 2)
    assert Shape().transaction_groups == 64


def test_a_late_rollout_completes_its_group_while_another_one_begins():
    source = Source(Shape(prompt=2, response=3, group=3))
    first = source.group("env", 1, 0)
    second = source.group("env", 2, 0)
    late = deque([first[0]])
    assert delayed(late, second) == [first[0], *second[1:]] and list(late) == [second[0]]
    assert delayed(deque(), second) == second  # nobody is late


def test_a_group_may_be_as_old_as_its_last_rollout_is_late(tmp_path: Path):
    # 1,400 rollouts wait in 200 groups that lack one: 200 groups, 12.5 batches of 16, are begun
    # until the last one comes
    shape = Shape(batch=128, stragglers=1_400)
    assert shape.straggling_batches == 13 and Shape().straggling_batches == 0
    assert run_file("r", tmp_path, shape, lookahead=2).buffer.max_age == 4 + 13
