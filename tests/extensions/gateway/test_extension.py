from __future__ import annotations

from typing import Any

import pytest

from streamrl.config.run_file import parse
from streamrl.system.errors import ConfigError

SERVED = {"kind": "verifiers:sums", "python": "/venv/bin/python"}


@pytest.mark.parametrize(
    ("env", "gateway", "says"),
    [
        (
            {"kind": "copy-digits"},
            {"host": "0.0.0.0"},
            "gateway.host 0.0.0.0 can be reached from other machines: set gateway.signing_secret",
        ),
        (SERVED, {"port": 0}, "envs.sums.python: its processes have to know where the gateway is"),
        (
            {"sessions": {}},
            {"revoked_before": {"sum": "2026-01-31T12:00:00Z"}},
            "gateway.revoked_before.sum: no env of this run that has sessions; did you mean 'sums'",
        ),
    ],
)
def test_what_cannot_work_is_named(env: dict[str, Any], gateway: dict[str, Any], says: str):
    with pytest.raises(ConfigError) as failed:
        parse({"run": "r", "envs": {"sums": env}, "gateway": gateway})
    assert says in str(failed.value)


def test_what_works_has_no_problem():
    gateway = {"host": "0.0.0.0", "signing_secret": "env:SECRET"}
    parse({"run": "r", "envs": {"sums": SERVED}, "gateway": gateway})
