from __future__ import annotations

from typing import Any

import numpy as np

from streamrl.run.monitoring.token_account import TokenAccount, length_name, token_report
from streamrl.stream.records import Fate, FateKind


def fate(
    kind: FateKind, tokens: list[int], version: int = 5, batch: int | None = None, env: str = "copy"
) -> Fate:
    count = len(tokens)
    return Fate(
        fate=kind,
        environment=env,
        partition=0,
        offsets=np.arange(count),
        policy_versions=np.full(count, version, np.int32),
        tokens=np.array(tokens, np.int32),
        batch=batch,
    )


def test_the_example_of_the_module():
    account = TokenAccount()
    account.add(fate("batched", [10], version=5, batch=7), newest=7)
    account.add(fate("expired", [6], version=3), newest=6)
    report = token_report(account)
    assert report["sampled"] == 16 and report["fates"] == {"batched": 10, "expired": 6}
    assert report["percent"] == {"batched": 62.5, "expired": 37.5}
    assert report["ages"] == {"2": {"batched": 10}, "3": {"expired": 6}}
    assert report["lengths"] == {"4 to 7": {"expired": 6}, "8 to 15": {"batched": 10}}
    assert account.share("expired") == 0.375


def test_tokens_by_env_age_and_length_each_add_up_to_all():
    rng = np.random.default_rng(0)
    account = TokenAccount()
    total = 0
    for kind, batch in (("batched", 30), ("expired", None), ("failed", None), ("filtered", None)):
        for version in range(30):
            tokens = rng.integers(0, 3_000, 5).tolist()
            total += sum(tokens)
            env = ("copy", "add")[version % 2]
            account.add(fate(kind, tokens, version, batch, env), newest=28)  # type: ignore[arg-type]
    report = token_report(account)
    assert report["sampled"] == total == sum(report["fates"].values())
    for by in ("envs", "ages", "lengths"):
        assert sum(sum(counts.values()) for counts in report[by].values()) == total
    assert list(report["ages"]) == [*map(str, range(8)), "8 or more"]
    assert list(report["lengths"])[-1] == "2048 to 4095"


def test_a_bucket_has_the_lengths_of_its_name():
    account = TokenAccount()
    account.add(fate("batched", [0, 1, 2, 3, 4, 7, 8], batch=5), newest=5)
    lengths = token_report(account)["lengths"]
    assert {name: counts["batched"] for name, counts in lengths.items()} == {
        "0": 0,
        "1": 1,
        "2 to 3": 5,
        "4 to 7": 11,
        "8 to 15": 8,
    }
    assert length_name(31) == f"{2**30} to {2**31 - 1}"


def test_a_rollout_that_could_not_be_read_is_counted_without_tokens():
    account = TokenAccount()
    where: dict[str, Any] = {"environment": "copy", "partition": 0, "offsets": np.arange(3)}
    account.add(Fate(fate="invalid", **where), newest=4)
    assert account.uncounted == 3 and account.share("invalid") is None


def test_tokens_of_a_rollout_without_a_version_have_an_unknown_age():
    account = TokenAccount()
    where: dict[str, Any] = {"environment": "copy", "partition": 0, "offsets": np.arange(1)}
    account.add(Fate(fate="invalid", tokens=np.array([9], np.int32), **where), newest=4)
    assert token_report(account)["ages"] == {"unknown": {"invalid": 9}}
