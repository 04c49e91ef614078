"""How vLLM is started and watched, and what is said when it ends."""

import os
import socket
import sys
import threading
from pathlib import Path

import pytest

from streamrl.config.sections.serving import Inference
from streamrl.inference.servers import vllm_process
from streamrl.inference.servers.vllm_launch import Installation, VllmLaunch
from streamrl.system.errors import ConfigError, InferenceError, ModelError, PortTaken
from tests.support.waiting import until

DOCKERFILE = Path(__file__).parents[3] / "deploy" / "docker" / "Dockerfile"


def test_the_line_of_the_log_that_says_why():
    log = """(APIServer pid=7) INFO 11-21 05:35:59 [api_utils.py:286] non-default args
(EngineCore pid=8) ERROR 11-21 05:38:06 [core.py:1750] Traceback (most recent call last):
(EngineCore pid=8) ERROR 11-21 05:38:06 [core.py:1750]     raise ValueError(
(EngineCore pid=8) ERROR 11-21 05:38:06 [core.py:1750] ValueError: Not enough memory for the cache.
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed: {}
"""
    assert vllm_process.last_error(log) == "ValueError: Not enough memory for the cache."
    assert vllm_process.last_error("a line\n\nKilled\n") == "Killed"
    assert vllm_process.last_error("") == "nothing was logged"


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(PortTaken, match="set inference.port"):
            vllm_process.take_port("127.0.0.1", other.getsockname()[1], wait_s=0.1)
    assert vllm_process.take_port("127.0.0.1", 0) > 0 and vllm_process.take_port("::1", 0) > 0
    with pytest.raises(
        ConfigError, match="inference.host 192.0.2.1 is not an address of this machine"
    ):
        vllm_process.take_port("192.0.2.1", 0)


def launch(directory: Path) -> VllmLaunch:
    return VllmLaunch(Inference(), directory, directory / "logs" / "log")


def test_a_directory_that_is_no_model(tmp_path: Path):
    with pytest.raises(ModelError, match="no config.json"):
        vllm_process.start(launch(tmp_path), threading.Event())


def test_a_server_that_ends_while_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.json").write_text("{}")
    installation = Installation("/env/bin/python", cuda=False)
    monkeypatch.setattr(vllm_process, "find_vllm", lambda settings: installation)
    monkeypatch.setattr(
        VllmLaunch,
        "command",
        lambda *args: [sys.executable, "-c", "raise ValueError('no such architecture')"],
    )
    with pytest.raises(
        InferenceError, match=r"vLLM ended after \d+ s: ValueError: no such architecture"
    ):
        vllm_process.start(launch(tmp_path), threading.Event())


@pytest.mark.parametrize("shown", ["", "stdout"])
def test_what_vllm_says_is_kept_and_in_a_container_shown(
    shown: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STREAMRL_VLLM_LOG", shown)
    command = [sys.executable, "-c", "print('RuntimeError: no room')"]
    process = vllm_process.VllmProcess(command, os.environ, tmp_path / "logs" / "vllm.log", "", "")
    until(lambda: not process.alive())
    process.stop()
    assert process.cause() == "RuntimeError: no room"
    assert capfd.readouterr().out == ("RuntimeError: no room\n" if shown else "")
    assert "ENV STREAMRL_VLLM_LOG=stdout" in DOCKERFILE.read_text()
