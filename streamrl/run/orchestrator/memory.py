"""The memory that a run's learner will hold on each of its devices, before it is started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

from streamrl.config.run_file import RunFile
from streamrl.system.errors import ConfigError
from streamrl.system.text import one_line


def learner_gib(run: RunFile, model_config: Mapping[str, object], devices: int) -> float:
    """GiB on each of the devices, from the learner's programs as `streamrl/learner/memory.py`
    compiles them, in a separate process. It takes half a minute to minutes.

    Raises ConfigError for settings that cannot be compiled.
    """
    asked = {"run": run.model_dump(mode="json"), "config": model_config, "devices": devices}
    done = subprocess.run(
        [sys.executable, "-m", "streamrl.learner.memory"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = one_line((done.stderr.strip().splitlines() or ["no reason given"])[-1], 300)
        raise ConfigError(f"the learner's memory cannot be computed: {reason}")
    return float(done.stdout.splitlines()[-1])
