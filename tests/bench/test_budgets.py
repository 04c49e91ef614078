"""The learner's memory, from programs that are compiled and never run."""

import json
import subprocess

import pytest

from bench import budgets
from bench.budgets import GIB, PROGRAMS, Memory


def test_a_program_within_its_budget():
    """The logits of its rows at once would be 4.6 GiB."""
    program = PROGRAMS["tiny"]
    assert budgets.measure(program).gib < program.budget_gib


@pytest.mark.parametrize(
    ("held_gib", "is_good", "said"), [(50, True, []), (51, False, ["step misses its budget"])]
)
def test_a_missed_budget_is_said(monkeypatch, capsys, held_gib, is_good, said):
    memory = Memory(arguments=held_gib * GIB, temporary=0, results=0)
    measured = subprocess.CompletedProcess([], 0, stdout=json.dumps(memory))
    monkeypatch.setattr(budgets.subprocess, "run", lambda *_, **__: measured)
    assert budgets.is_within_budget("step") is is_good
    _row, *rest = capsys.readouterr().out.splitlines()
    assert rest == said
