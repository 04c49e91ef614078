from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.config.run_file import parse
from streamrl.run.orchestrator import memory
from streamrl.run.orchestrator.memory import learner_gib
from streamrl.system.errors import ConfigError

RUN = parse(
    {
        "run": "r",
        "envs": {"copy-digits": {}},
        "learner": {"mesh": {"data": 3}},
        "batcher": {"processes": 3},
    }
)


def test_the_run_its_model_and_its_devices_are_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """To a stand-in of the program, which tests/learner/test_memory.py has."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/asked\necho warning\necho 12.5\n")
    program.chmod(0o755)
    monkeypatch.setattr(memory.sys, "executable", str(program))
    assert learner_gib(RUN, {"hidden_size": 64}, devices=3) == 12.5
    asked = json.loads((tmp_path / "asked").read_text())
    assert asked["devices"] == 3 and asked["config"] == {"hidden_size": 64}
    assert asked["run"] == RUN.model_dump(mode="json")


def test_settings_that_cannot_be_compiled_are_an_error():
    with pytest.raises(ConfigError, match="memory cannot be computed: .*learner.mesh is for 3"):
        learner_gib(RUN, {}, devices=1)
