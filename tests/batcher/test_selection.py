from __future__ import annotations

import random

from streamrl.batcher.selection import (
    DATA,
    REMAINDER,
    Candidate,
    Offer,
    carry_deficit,
    charged_for,
    quotas,
    select,
    shortage,
    tokens_owed,
    waits_for,
)


def supply(**sizes: list[int]) -> tuple[dict[str, int], Offer]:
    """Tokens and groups of envs, whose newest group is the first."""

    def offer(env: str, number: int) -> Candidate | None:
        return Candidate(env, number, sizes[env][number]) if number < len(sizes[env]) else None

    return {env: sum(tokens) for env, tokens in sizes.items()}, offer


def test_what_the_fractions_leave_is_the_rest():
    assert quotas({"a": 0.5, "b": 0.25}) == {"a": 0.5, "b": 0.25, REMAINDER: 0.25}
    assert quotas({"a": 0.0}) == {REMAINDER: 1.0}


def test_the_share_that_lacks_most_takes_next():
    # budget 40: a is due 30, b 10. a takes until both lack 10; a comes first among equals
    out = select(
        *supply(a=[10] * 9, b=[10] * 9),
        tokens_owed({"a": 0.75, "b": 0.25}, {}, 40),
        40,
        spill=False,
    )
    assert [(c.env, c.position) for c in out.chosen] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert out.charged == {"a": 30, "b": 10, REMAINDER: 0} and out.short == {}


def test_a_shortage_blocks_and_names_what_is_missing():
    out = select(
        *supply(a=[10], b=[10] * 9), tokens_owed({"a": 0.5, "b": 0.5}, {}, 40), 40, spill=False
    )
    assert out.short == {"a": 10}


def test_what_a_batch_waits_for():
    fractions = {"a": 0.5, "b": 0.25}
    assert (
        waits_for({"a": 9, "b": 1, REMAINDER: 2}, fractions) == DATA
    )  # nobody's share is complete
    assert waits_for({"a": 9, REMAINDER: 2}, fractions) == "a"
    assert waits_for({REMAINDER: 2}, fractions) == REMAINDER
    assert waits_for({"a": 1, "b": 9}, {"a": 0.5, "b": 0.5}) == DATA  # they leave no rest


def test_what_is_lacking_is_known_without_selecting():
    # budget 40: a is due 20, b 10, the rest 10
    fractions = {"a": 0.5, "b": 0.25}
    assert (
        shortage({"a": 20, "b": 10, "c": 10}, tokens_owed(fractions, {}, 40), 40, spill=False) == {}
    )
    assert shortage({"a": 19, "b": 10, "c": 10}, tokens_owed(fractions, {}, 40), 40, False) == {
        "a": 1
    }
    # b's 15 to spare serve the rest only
    assert shortage({"a": 12, "b": 25}, tokens_owed(fractions, {}, 40), 40, spill=False) == {"a": 8}
    assert shortage({"a": 20, "b": 14}, tokens_owed(fractions, {}, 40), 40, spill=False) == {
        REMAINDER: 6
    }
    assert shortage({}, tokens_owed(fractions, {"a": -5.0, "b": 5.0}, 40), 40, spill=False) == {
        "a": 15,
        "b": 15,
        REMAINDER: 10,
    }
    # a batch's worth: whole groups may fill it before a's turn comes
    assert shortage({"a": 12, "b": 28}, tokens_owed(fractions, {}, 40), 40, spill=False) == {}
    assert shortage({"b": 40}, tokens_owed(fractions, {}, 40), 40, spill=True) == {}
    assert shortage({"b": 36}, tokens_owed(fractions, {}, 40), 40, spill=True) == {REMAINDER: 4}


def test_spill_lets_the_others_fill_in():
    out = select(
        *supply(a=[10], b=[10] * 9), tokens_owed({"a": 0.5, "b": 0.5}, {}, 40), 40, spill=True
    )
    assert out.short == {} and [c.env for c in out.chosen].count("b") == 3
    assert carry_deficit({"a": 0.5, "b": 0.5}, {}, out.charged, spill=True) == {
        "a": 0,
        "b": 0,
        REMAINDER: 0,
    }


def test_a_group_that_is_left_out_is_charged_to_no_share():
    owed = tokens_owed({"a": 0.5}, {}, 40)
    out = select(*supply(a=[10, 10], b=[10, 10]), owed, 40, spill=False)
    assert [c.env for c in out.chosen] == ["a", "b", "a", "b"]
    assert charged_for(out, 4) == out.charged == {"a": 20, REMAINDER: 20}
    assert charged_for(out, 3) == {"a": 20, REMAINDER: 10}
    assert charged_for(out, 2) == {"a": 10, REMAINDER: 10}
    assert out.charged == {"a": 20, REMAINDER: 20}, "the selection is as it was"


def test_the_rest_goes_by_availability():
    out = select(*supply(a=[10], b=[10, 10, 10]), tokens_owed({"a": 0.25}, {}, 40), 40, spill=False)
    assert sorted(c.env for c in out.chosen) == ["a", "b", "b", "b"]


def test_the_rest_takes_evenly_and_leaves_everybody_his_own_share():
    # budget 60, a is due 30: two of its five groups are spare. The rest, 30, takes in turn: from a,
    # b, c
    out = select(
        *supply(a=[10] * 5, b=[10] * 9, c=[10]), tokens_owed({"a": 0.5}, {}, 60), 60, spill=False
    )
    assert sorted(c.env for c in out.chosen) == ["a", "a", "a", "a", "b", "c"] and out.short == {}
    # nothing of a is spare now: the rest lacks a group rather than a's share
    assert select(
        *supply(a=[10] * 3, b=[10, 10]), tokens_owed({"a": 0.5}, {}, 60), 60, spill=False
    ).short == {REMAINDER: 10}


def test_a_group_that_would_not_fit_ends_the_batch_and_the_balance_makes_up_for_it():
    fractions = {"a": 0.5, "b": 0.5}
    out = select(*supply(a=[15, 15], b=[15, 15]), tokens_owed(fractions, {}, 40), 40, spill=False)
    assert [c.env for c in out.chosen] == ["a", "b"] and out.short == {}  # a third would make 45
    assert carry_deficit(fractions, {}, {"a": 30, "b": 15, REMAINDER: 0}, spill=False) == {
        "a": -7.5,
        "b": 7.5,
        REMAINDER: 0.0,
    }


def test_fractions_hold_within_2_percent_over_50_batches_with_rates_10_to_1():
    """A simulated supply: env `fast` makes ten groups where `slow` makes one, of any size; both are
    asked for their share.
    """
    rng = random.Random(0)
    fractions = {"fast": 0.5, "slow": 0.3}
    balance = dict[str, float]()
    used = {"fast": 0, "slow": 0, REMAINDER: 0}
    pools: dict[str, list[int]] = {"fast": [], "slow": []}
    batches = 0
    while batches < 50:
        for env, rate in (("fast", 10), ("slow", 1)):
            pools[env] += (
                [rng.randint(50, 400) for _ in range(rate)] if sum(pools[env]) < 20_000 else []
            )
        out = select(*supply(**pools), tokens_owed(fractions, balance, 10_000), 10_000, spill=False)
        if out.short:
            continue
        batches += 1
        balance = carry_deficit(fractions, balance, out.charged, spill=False)
        for share, tokens in out.charged.items():
            used[share] += tokens
        for env in pools:
            gone = {c.position for c in out.chosen if c.env == env}
            pools[env] = [size for i, size in enumerate(pools[env]) if i not in gone]
    total = sum(used.values())
    assert total > 50 * 9_500
    for share, fraction in quotas(fractions).items():
        assert abs(used[share] / total - fraction) < 0.02 * fraction


def test_nothing_that_can_be_selected_is_called_short():
    rng = random.Random(1)
    for _ in range(2_000):
        groups = {
            env: [rng.randint(5, 40) for _ in range(rng.randint(0, 6))] for env in ("a", "b", "c")
        }
        fractions = {"a": 0.3, "b": rng.choice([0.2, 0.7])}
        spill = rng.random() < 0.5
        tokens = {env: sum(sizes) for env, sizes in groups.items()}
        if shortage(tokens, tokens_owed(fractions, {}, 100), 100, spill):
            assert select(*supply(**groups), tokens_owed(fractions, {}, 100), 100, spill).short


def test_how_much_may_come_for_others_before_it_is_worth_selecting_again():
    # budget 60, each is due 20. b has its turn when a has taken 15, and has nothing; a has it
    # again, 5 short, when c has taken 30
    pools = {"a": [15], "b": [], "c": [30]}
    due = dict.fromkeys(pools, 1 / 3)
    out = select(*supply(**pools), tokens_owed(due, {}, 60), 60, spill=False)
    assert out.short == {"b": 20, "a": 5} and out.retry_after_tokens == {"b": 45, "a": 15}


def test_as_long_as_selecting_again_is_futile_the_share_is_short_again():
    rng = random.Random(2)
    tried = 0
    ended = 0
    for _ in range(3_000):
        envs = [f"env-{i}" for i in range(rng.randint(2, 6))]
        pools = {env: [rng.randint(1, 30) for _ in range(rng.randint(0, 4))] for env in envs}
        owed = tokens_owed(
            dict.fromkeys(envs, 1 / len(envs)), {env: rng.uniform(-9, 9) for env in envs}, 60
        )
        futile = select(*supply(**pools), owed, 60, spill=False).retry_after_tokens
        for share, tokens in futile.items():
            others = {env: list(sizes) for env, sizes in pools.items()}
            left = tokens
            while (size := rng.randint(1, 30)) <= left:
                others[env := rng.choice([env for env in envs if env != share])].insert(
                    rng.randint(0, len(others[env])), size
                )
                left -= size
            again = select(*supply(**others), owed, 60, spill=False)
            assert share in again.short
            tried += others != pools
            # too large for anything: it ends the batch where it has its turn
            others[rng.choice([env for env in envs if env != share])] = [61]
            ended += share not in select(*supply(**others), owed, 60, spill=False).short
    assert tried > 1_000 and ended > 100
