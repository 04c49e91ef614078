"""The runbook has a page for every alert, and for nothing else; its table of exit codes is that of
the errors.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from streamrl.run.orchestrator.plan import FATAL
from streamrl.system import errors
from streamrl.system.errors import StreamrlError

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text()
RUNBOOK = PAGE.split("\n# Alerts\n")[1].split("\n# ")[0]
ALERTS = [
    rule["alert"]
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())[
        "groups"
    ]
    for rule in group["rules"]
]


def test_every_alert_has_its_heading_in_order():
    assert re.findall(r"^## (.+)$", RUNBOOK, re.MULTILINE) == ALERTS and len(ALERTS) > 10


@pytest.mark.parametrize("alert", ALERTS)
def test_it_states_where_to_look_and_what_to_do(alert: str):
    text = RUNBOOK.split(f"## {alert}\n")[1].split("\n## ")[0]
    assert re.findall(r"^\*\*(\w+)\*\* \S", text, re.MULTILINE) == ["Look", "Do"]


def test_the_table_of_exit_codes_knows_which_ends_are_final():
    rows = re.findall(r"^\| ([\d, ]+) \| .*? \| (yes|no)", PAGE, re.MULTILINE)
    said = {int(code): restarted == "yes" for codes, restarted in rows for code in codes.split(",")}
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, StreamrlError)
    ]
    known = {kind.exit_code for kind in kinds} - {StreamrlError.exit_code}
    assert said.keys() <= known and said == {code: code not in FATAL for code in said}
    # of commands, not of parts
    assert known - said.keys() == {errors.PortTaken.exit_code, errors.ExportError.exit_code}
