"""Signals at the worst moments, in processes of their own: what goes wrong here waits
without end.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.waiting import patience

LIMIT_S = patience(60.0)
BEGIN = """
import signal
from streamrl.system.signals import stop_on
from tests.support.waiting import patience

noted = []
stop = stop_on([signal.SIGTERM, signal.SIGINT], noted.append)
"""
LOCKED = """
with vars(stop)["_cond"]:  # as `wait` holds it before and after it waits
    signal.raise_signal(signal.SIGTERM)
stop.wait()
print(noted)
"""
REFUSED = """
def once(number):
    if noted:
        raise KeyboardInterrupt
    noted.append(int(number))

stop = stop_on([signal.SIGINT], once)
signal.raise_signal(signal.SIGINT)
stop.wait()
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print(noted)
"""


@pytest.mark.parametrize(
    ("moment", "came"), [(LOCKED, "[15]"), (REFUSED, "[2]")], ids=["locked", "refused"]
)
def test_the_event_is_set_and_the_signal_noted(moment: str, came: str):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + moment], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert (done.stdout, done.stderr, done.returncode) == (f"{came}\n", "", 0)
