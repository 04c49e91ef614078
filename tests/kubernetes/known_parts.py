"""`streamrl` of a pod whose learner and envs are known functions: `python -m
tests.kubernetes.known_parts ARGUMENTS OF STREAMRL`. The other parts are real.
"""

from __future__ import annotations

import os
import sys

from streamrl.cli import main
from streamrl.config import run_file
from streamrl.config.topology import env_part

if __name__ == "__main__":
    role, file, *options = sys.argv[1:]
    if role in ("learner", "env"):
        name = role if role == "learner" else env_part(options[0], 0)
        (run_file.load(file).directory / "notes").mkdir(parents=True, exist_ok=True)
        part = [sys.executable, "-m", "tests.chaos.part", file, name, "transactions"]
        os.execv(sys.executable, part)
    main()
