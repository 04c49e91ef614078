"""Which broker the tests use is said by one variable; what cannot be had is said in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.stream.local_kafka.distribution import FILES
from tests.support import brokers
from tests.support.brokers import ROOT, VARIABLE
from tests.support.waiting import patience


def contract(directory: Path, kind: str) -> subprocess.CompletedProcess[str]:
    """The broker's contract, in a pytest of its own on a machine where no Docker answers."""
    environment = {
        **os.environ,
        VARIABLE: kind,
        "DOCKER_HOST": f"unix://{directory}/docker.sock",
        "HOME": str(directory),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-q",
        f"--basetemp={directory}/temp",
    ]
    tests = "tests/stream/log/test_contract.py"
    return subprocess.run(
        [*command, "-k", "kafka", tests],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=patience(300),
    )


def test_a_container_is_chosen_and_without_docker_the_tests_end_with_one_line_that_says_so(
    tmp_path: Path,
):
    done = contract(tmp_path, "container")
    said = done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, said
    (line,) = said.strip().splitlines()
    assert (
        "STREAMRL_TEST_BROKER=container needs Docker, and none answers here (" in line
        and f"or leave {VARIABLE} out" in line
    )
    assert "passed" not in said and "failed" not in said


def test_another_kind_is_refused_before_any_test(tmp_path: Path):
    done = contract(tmp_path, "podman")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "STREAMRL_TEST_BROKER is 'podman'; give local or container" in done.stderr


def test_local_is_what_is_chosen_without_a_word():
    assert (
        brokers.chosen({}) == brokers.chosen({VARIABLE: ""}) == "local"
        and brokers.chosen({VARIABLE: "container"}) == "container"
    )


def test_variables_of_the_image_become_kafkas_settings():
    made = brokers.properties(
        {
            "KAFKA_MESSAGE_MAX_BYTES": 8,
            "KAFKA_AUTO_CREATE_TOPICS_ENABLE": "false",
            "CLUSTER_ID": "x",
        }
    )
    assert made == {"message.max.bytes": "8", "auto.create.topics.enable": "false"}


def test_the_compose_files_kafka_has_the_settings_of_the_local_one():
    """But for where it listens and keeps its data, and for what keeps a broker small on a machine
    that it shares with a learner.
    """
    lines = (
        line.partition("=")
        for line in (FILES / "server.properties").read_text().splitlines()
        if line and not line.startswith("#")
    )
    own = {name: value for name, _, value in lines}
    there = brokers.properties(brokers.service()["environment"])
    small = {
        name
        for name in own
        if name.endswith(".threads")
        or ".threads." in name
        or name.startswith(("log.cleaner.", "broker.heartbeat."))
    }
    places = {*brokers.PLACES, "controller.quorum.bootstrap.servers"}
    assert {
        name: value for name, value in own.items() if name not in small | places
    } == brokers.settings(brokers.service()["environment"])
    assert (
        there["node.id"] == own["node.id"]
        and there["listener.security.protocol.map"] == own["listener.security.protocol.map"]
    )
    assert set(there) >= set(brokers.PLACES), (
        "with one variable the image takes no setting of its own: all are needed"
    )
