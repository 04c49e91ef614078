from __future__ import annotations

import subprocess
import sys

import pytest

READS = """
import ctypes
from streamrl.system.hidden_memory import hide_memory
PR_GET_DUMPABLE = 3
prctl = ctypes.CDLL(None).prctl
before = prctl(PR_GET_DUMPABLE, 0, 0, 0, 0)
hide_memory()
print(before, prctl(PR_GET_DUMPABLE, 0, 0, 0, 0))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this")
def test_the_kernel_closes_the_process_to_others_of_its_user():
    command = [sys.executable, "-c", READS]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == "1 0\n"
