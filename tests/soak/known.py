"""What a soak run consists of. Rollouts are those of `tests/chaos/known.py`: a function of env,
problem and sample.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from streamrl.config.run_file import RunFile, parse
from tests.chaos.known import GROUP_SIZE, MAX_SEQ_LEN
from tests.support import rubbish

RUBBISH = rubbish.ENV
SILENT = "silent"
BURSTY = ("burst0", "burst1")
ENVS_A_PROCESS = 25
GROUP_TOKENS = 28  # on average
ENV_STEP_S = 0.022  # that the learner takes for the group of one env; a batch has one of each
WEIGHTS_BYTES = 1 << 20
KEEP_VERSIONS = 4


def run_file(directory: Path, envs: int) -> RunFile:
    """`envs` producers, each with the same share. What one cannot supply the others fill in: one of
    them never sends anything.
    """
    steady = [f"env{i}" for i in range(envs - 4)]
    settings = {
        "run": directory.name,
        "runs_dir": str(directory.parent),
        "envs": {
            name: {"fraction": round(1 / envs - 1e-6, 6)}
            for name in (*steady, *BURSTY, SILENT, RUBBISH)
        },
        "buffer": {"group_size": GROUP_SIZE, "min_group_size": 2, "max_age": 2},
        "batcher": {
            "total_token_budget": envs * GROUP_TOKENS,
            "max_seq_len": MAX_SEQ_LEN,
            "lookahead": 1,
            "on_shortage": "spill",
        },
        "model": {"max_seq_len": MAX_SEQ_LEN},
        "weights": {"keep_versions": KEEP_VERSIONS},
    }
    return parse(settings)


def producers(run: RunFile, process: int) -> list[str]:
    """The envs whose producers are in that process."""
    return list(run.envs)[process :: processes(run)]


def processes(run: RunFile) -> int:
    """How many the producers are in."""
    return math.ceil(len(run.envs) / ENVS_A_PROCESS)


def parts(run: RunFile) -> list[str]:
    """The processes of a run but the broker, in the order they are started."""
    return ["learner", "buffer", "batcher", *(f"env-producers-{i}" for i in range(processes(run)))]


def weights(name: str) -> bytes:
    """What a hash stands for: as many bytes as a small model has."""
    return np.random.default_rng(int(name, 16)).bytes(WEIGHTS_BYTES)
