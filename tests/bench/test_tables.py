"""Every bench shows what it has measured, whatever of it there is."""

from io import StringIO

from rich.console import Console

from bench import learner, loop, weights


def shown(table: object) -> str:
    console = Console(width=200, record=True, file=StringIO())
    console.print(table)
    return console.export_text()


def test_weights_with_and_without_vllm():
    ratio = {"median": 1.25, "min": 1.0, "max": 2.0}
    plain = {
        "size": "1 GB",
        "servers": 2,
        "plain": 0.5,
        "all": 1.0,
        "pull": 0.75,
        "ratio": ratio,
        "ratio_to_swap": ratio,
    }
    in_flight = {
        "all": 2.0,
        "pause_seen_s": {"median": 0.125, "max": 0.375},
        "between_tokens_s": 0.002,
    }
    text = shown(
        weights.table(
            [
                plain,
                {**plain, "size": "1 MB", "servers": 1, "reload": 0.0625, "in_flight": in_flight},
            ]
        )
    )
    assert all(
        said in text
        for said in ("1 GB, 2 servers", "1 MB, 1 server", "750.0", "62.5", "1.25", "375.0")
    )


def test_a_loop():
    run = {
        "name": "overlapped",
        "steps_per_s": 2.5,
        "step_s": 0.1,
        "swap_s": 0.05,
        "batch_age_mean": 1.0,
        "expired_frac": 0.25,
    }
    run |= {part: dict.fromkeys(labels, 0.125) for part, labels in loop.LABELS.items()}
    runs = [
        run,
        {**run, "name": "one at a time", "steps_per_s": 2.0},
        {**run, "steps_per_s": 3.5},
        {**run, "name": "one at a time"},
    ]
    rows = [
        [cell.strip() for cell in line.split("|")[1:4]] for line in loop.table(runs).splitlines()
    ]
    assert rows[0] == ["", "overlapped", "one at a time"]
    assert ["steps/s", "3.00", "2.25"] in rows and [
        "a step, a swap, ms",
        "100, 50",
        "100, 50",
    ] in rows
    assert ["rollouts that expired", "25.0%", "25.0%"] in rows and [
        "server: idle, one env is slow",
        "12.5%",
        "12.5%",
    ] in rows
    assert loop.gains(runs, "overlapped", "one at a time") == {
        "median": 1.325,
        "min": 1.25,
        "max": 1.4,
    }


def test_a_learner():
    ratio = {"median": 0.96875, "min": 0.5, "max": 1.0}
    ms = {name: {"mean": 150.0} for name in learner.LABELS}
    found = {
        "model": "4 x 128",
        "rows": 8,
        "max_seq_len": 256,
        "tokens_per_s": {"learner": 9000.0, "levanter": 9300.0},
    }
    text = shown(
        learner.table(
            [
                {
                    **found,
                    "ratio": ratio,
                    "ratio_of_turns": {"median": 0.9375},
                    "ratio_of_the_step": ratio,
                    "ms": ms,
                    "loss_off_max": 3e-8,
                }
            ]
        )
    )
    assert all(said in text for said in ("4 x 128, 8 x 256", "9,300", "0.969", "0.938", "150.0"))
