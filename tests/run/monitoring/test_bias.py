from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec import structs
from rich.console import Console

from streamrl.run.monitoring.bias import BiasAccount, Shift, bias_lines, bias_report
from streamrl.run.monitoring.run_view import update_view
from streamrl.run.monitoring.show_status import tables
from streamrl.stream.log.protocol import Event
from streamrl.stream.records import Fate, FateKind
from tests.run.monitoring.events import running_frame


def fate(kind: FateKind, tokens: Sequence[float], env: str = "copy") -> Fate:
    count = len(tokens)
    return Fate(
        fate=kind,
        environment=env,
        partition=0,
        offsets=np.arange(count),
        tokens=np.array(tokens, np.int32),
        turns=np.ones(count, np.int32),
        rewards=np.full(count, 0.5),
        batch=0 if kind == "batched" else None,
    )


def shifts(account: BiasAccount) -> dict[tuple[str, str], Shift]:
    return {(found.env, found.feature): found for found in account.shifts()}


def test_means_and_standard_error_worked_by_hand():
    """40 groups of two tokens' mean 10 +- 2 are trained, and 20 of 40 expire: T = 10, R = 20. Of
    the trained (s - T n)/n1 - (s - R n)/n is (+-2)/40 - (+-2 - 10)/60, of the expired -20/60.
    """
    account = BiasAccount()
    for index in range(40):
        account.add(fate("batched", [8 if index % 2 else 12]))
    for _ in range(20):
        account.add(fate("expired", [40]))
    found = shifts(account)["copy", "length"]
    assert (found.trained, found.launched) == (10, 20)
    parts = [2 / 40 - (2 - 10) / 60] * 20 + [-2 / 40 - (-2 - 10) / 60] * 20 + [-20 / 60] * 20
    assert found.error == pytest.approx(np.sqrt(np.square(parts).sum()))
    assert found.is_alarm
    assert bias_lines(account) == [
        f"copy: trained on length 10, launched 20 (mean; +- {found.error:.2g}),"
        " because rollouts expire"
    ]


def test_the_standard_error_is_the_spread_of_repeated_runs():
    rng = np.random.default_rng(3)
    differences = list[float]()
    errors = list[float]()
    alarms = 0
    for _ in range(300):
        account = BiasAccount()
        for _ in range(200):
            kind: FateKind = "expired" if rng.random() < 0.2 else "batched"
            mean = rng.uniform(50, 150)  # The rollouts of a group are alike.
            account.add(fate(kind, rng.normal(mean, 5, rng.integers(2, 9)).tolist()))
        found = shifts(account)["copy", "length"]
        differences.append(found.trained - found.launched)
        errors.append(found.error)
        alarms += found.is_alarm
    assert np.std(differences) == pytest.approx(np.mean(errors), rel=0.15)
    assert abs(np.mean(differences)) < 3 * np.std(differences) / np.sqrt(300)
    assert alarms == 0


def test_a_shift_within_a_tenth_is_no_alarm():
    assert not Shift("copy", "length", launched=100, trained=91, error=0.1).is_alarm
    assert Shift("copy", "length", launched=100, trained=89, error=0.1).is_alarm
    assert not Shift("copy", "length", launched=100, trained=89, error=3).is_alarm


def test_few_fates_and_fates_by_choice_give_no_alarm():
    account = BiasAccount()
    for _ in range(50):
        account.add(fate("batched", [10]))
        account.add(fate("filtered", [90]))
    for _ in range(19):
        account.add(fate("expired", [90]))
    [entry] = [entry for entry in bias_report(account) if entry["feature"] == "length"]
    assert entry["trained"] == 10 and entry["launched"] == pytest.approx((500 + 1710) / 69)
    assert entry["standard_error"] is None and not bias_lines(account)
    account.add(fate("expired", [90]))
    assert len(bias_lines(account)) == 1


def test_an_env_whose_rollouts_expire_has_a_smaller_share():
    account = BiasAccount()
    for index in range(100):
        account.add(fate("batched", [5, 5], env="copy"))
        account.add(fate("expired" if index % 2 else "batched", [5, 5], env="slow"))
    found = shifts(account)
    assert found["slow", "share"].launched == 0.5
    assert found["slow", "share"].trained == pytest.approx(1 / 3)
    assert found["copy", "share"].trained == pytest.approx(2 / 3)
    assert {line.partition(":")[0] for line in bias_lines(account)} == {"copy", "slow"}


def test_an_env_of_which_nothing_is_trained_has_a_share_of_0():
    account = BiasAccount()
    for _ in range(100):
        account.add(fate("batched", [5], env="copy"))
        account.add(fate("expired", [5], env="slow"))
    assert shifts(account)["slow", "share"].trained == 0 and len(bias_lines(account)) == 2


def test_an_alarm_is_in_status_and_in_the_lines_of_up():
    frame = running_frame()
    fates = [fate("batched", [10]), fate("expired", [90])] * 20
    view = update_view(frame.view, [Event("fates", 0, 0, "g", record) for record in fates])
    line = "copy: trained on length 10, launched 50 (mean; +- 0), because rollouts expire"
    assert line.partition(" (")[0] in " | ".join(frame.troubles)
    console = Console(width=160, file=io.StringIO(), record=True)
    for renderable in tables(frame.run, view, [], frame.time_s):
        console.print(renderable)
    assert line.partition(" (")[0] in console.export_text()


def test_fates_whose_tokens_are_not_known_have_no_share():
    account = BiasAccount()
    for env in ("copy", "add"):
        account.add(structs.replace(fate("batched", [5], env), tokens=None))
    assert {found.feature for found in account.shifts()} == {"reward", "turns"}
