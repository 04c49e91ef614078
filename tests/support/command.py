"""The command `streamrl` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.waiting import patience


def streamrl(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "streamrl.cli", *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=patience(120),
        env={**os.environ, **environment},
    )
