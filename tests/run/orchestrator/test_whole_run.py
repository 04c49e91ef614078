"""Whole runs, with a real broker and a real `streamrl up`; the parts are actors (`actor.py`)."""

import json
import os
import pty
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.learner.initial import tiny_tokenizer
from streamrl.run.orchestrator.supervisor import last_line
from tests.run.monitoring.sinks.readers import tensorboard_points
from tests.run.orchestrator.stage import RESTARTS
from tests.support.hub import serving_hub
from tests.support.processes import MARK, left_after, marked
from tests.support.waiting import patience, until

REPOSITORY = Path(__file__).parents[3]
STAGE = [sys.executable, "-m", "tests.run.orchestrator.stage"]
PARTS = ["learner", "inference-0", "buffer", "batcher", "env-copy-digits-0", "env-add-digits-0"]


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    target = {"env": "copy-digits", "reward": 0.9, "batches": 5}
    path = tmp_path / "staged.yaml"
    envs = {"copy-digits": {"fraction": 0.6}, "add-digits": {}}
    path.write_text(
        yaml.safe_dump(
            {
                "run": "staged",
                "runs_dir": str(tmp_path / "runs"),
                "envs": envs,
                "orchestrator": {"target": target, "max_wall_s": 60},
            }
        )
    )
    return path


def streamrl(mark: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, MARK: mark}
    return subprocess.run(
        [*STAGE, *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(120),
    )


def test_a_run_from_its_start_to_its_second_life(run_file: Path, mark: str):
    home = run_file.parent / "runs" / "staged"

    sinks = ("--set", "orchestrator.sinks=[jsonl, tensorboard, console]")
    first = streamrl(mark, "up", run_file, *sinks)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "target reached: copy-digits earned" in first.stdout
    assert left_after(mark) == []
    check_report(json.loads((home / "report.json").read_text()))
    assert (home / "reward.png").read_bytes().startswith(b"\x89PNG")
    # as resolved
    assert yaml.safe_load((home / "run.yaml").read_text())["buffer"]["group_size"] == 8
    for part in PARTS:  # Kafka's client may have said something behind it
        assert f"{part} is on stage\n" in (home / "logs" / f"{part}.log").read_text()

    shown = streamrl(mark, "status", run_file)
    assert shown.returncode == 0, shown.stderr
    assert (
        "broker is stopped" in shown.stderr
        and "inference-0" in shown.stdout
        and "policy version" in shown.stdout
    )
    assert left_after(mark) == []

    refused = streamrl(mark, "up", run_file)
    assert refused.returncode == 1 and refused.stdout == ""
    assert (
        refused.stderr.startswith("streamrl: run 'staged' exists in")
        and "--resume" in refused.stderr
        and refused.stderr.count("\n") == 1
    )

    lines, curves = check_curves(home)
    resumed = streamrl(mark, "up", run_file, "--resume", *sinks)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    more, continued = check_curves(home)
    assert more[: len(lines)] == lines
    assert all(continued[name].items() >= points.items() for name, points in curves.items())
    afresh = streamrl(mark, "up", run_file, "--fresh", "--set", "orchestrator.target.batches=4")
    assert afresh.returncode == 0, afresh.stdout + afresh.stderr
    [archived] = (home.parent / "archive").iterdir()
    assert (
        archived.name.startswith("staged-")
        and (archived / "report.json").exists()
        and (archived / "kafka" / "data").is_dir()
    )
    assert left_after(mark) == []


def test_a_run_of_a_model_on_the_hub_names_its_commit_in_both_lives(
    run_file: Path, mark: str, monkeypatch: pytest.MonkeyPatch
):
    home = run_file.parent / "runs" / "staged"
    model = run_file.parent / "model"
    tokenizer = tiny_tokenizer("0123456789")
    tokenizer.chat_template = "{{ messages[-1].content }}<bos>"
    tokenizer.save_pretrained(model)
    (model / "config.json").write_text('{"eos_token_id": 2}')
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    monkeypatch.setenv("HF_HOME", str(run_file.parent / "cache"))
    chosen = ("--set", "model.path=me/small", "--set", "orchestrator.target.batches=2")
    with serving_hub() as hub:
        commit = hub.model("me/small", files)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        first = streamrl(mark, "up", run_file, *chosen)
        assert first.returncode == 0, first.stdout + first.stderr
        missing = streamrl(mark, "up", run_file, "--fresh", "--set", "model.path=me/none")
        assert (missing.returncode, missing.stdout) == (15, "")
        assert missing.stderr.endswith(
            f"streamrl: model me/none: no such model on {hub.url}, and no such directory here;"
            " check the name, and set HF_TOKEN if the repository is private\n"
        )
        hub.model("me/small", {**files, "config.json": b"{}"})
    named = f"me/small@{commit}"
    assert yaml.safe_load((home / "run.yaml").read_text())["model"]["path"] == named
    assert (
        "its chat template ends an answer with '<bos>' (1), and servers stop at 2" in first.stdout
    )
    resumed = streamrl(mark, "up", run_file, "--resume", *chosen)  # Without a hub.
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert yaml.safe_load((home / "run.yaml").read_text())["model"]["path"] == named
    assert left_after(mark) == []


@pytest.mark.parametrize("second_dir", ["second", "runs"])
def test_a_run_on_two_machines(
    run_file: Path, mark: str, broker: str, run_name: str, second_dir: str
):
    """The second joins while the first has not begun, starts its server and ends with the run."""
    environment = {**os.environ, MARK: mark, "STREAMRL_KAFKA": broker}
    named = [str(run_file), "--set", f"run={run_name}"]
    runs_dir = run_file.parent / second_dir
    second = [*named, "--only", "inference", "--set", f"runs_dir={runs_dir}"]
    joined = subprocess.Popen(
        [*STAGE, "up", *second], cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True
    )
    first = subprocess.run(
        [*STAGE, "up", *named, "--except", "inference"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert first.returncode == 0, first.stdout + first.stderr
    said, _ = joined.communicate(timeout=patience(60))
    assert joined.returncode == 0 and "target reached: copy-digits earned" in said, said
    homes = {run_file.parent / "runs" / run_name, runs_dir / run_name}
    logs = {path.stem for home in homes for path in (home / "logs").iterdir()}
    assert logs == {*PARTS, "orchestrator", "orchestrator-inference-0"}
    first_home = run_file.parent / "runs" / run_name
    for name in ("report.json", "metrics.jsonl"):
        assert [home for home in homes if (home / name).exists()] == [first_home]
    assert left_after(mark) == []


def test_a_machine_joins_a_run_whose_kafka_is_named(run_file: Path, mark: str):
    failed = streamrl(mark, "up", run_file, "--only", "inference")
    assert "--only joins a run whose Kafka others reach" in failed.stderr
    wrong = streamrl(mark, "up", run_file, "--only", "inferences")
    assert "inferences: no role or part of this run; did you mean 'inference'" in wrong.stderr


def check_curves(home: Path) -> tuple[list[int], dict[str, dict[int, float]]]:
    """Every record of the topic is there once, and no step of a curve is missing. The actor that is
    the loop plays the same steps in its second life.
    """
    lines = [json.loads(line) for line in (home / "metrics.jsonl").read_text().splitlines()]
    offsets = [line["offset"] for line in lines]
    assert offsets == sorted(set(offsets))
    curves: dict[str, dict[int, float]] = {}
    for name, step, value in tensorboard_points(home / "tensorboard"):
        curves.setdefault(name, {})[step] = value
    reward = curves["batches/copy-digits/reward/mean"]
    assert list(reward) == list(range(len(reward))) and len(reward) > 30
    assert {
        line["values"]["batches/copy-digits/reward/mean"]
        for line in lines
        if "batches/copy-digits/reward/mean" in line["values"]
    } == {0.0, 1.0}
    return offsets, curves


def check_report(report: dict[str, Any]) -> None:
    [server] = report["servers"]
    assert server["id"] == "inference-0" and server["version"] in (
        report["policy_version"] - 1,
        report["policy_version"],
    )
    assert report["run"] == "staged" and report["logprob_mismatch_tokens"] >= 63
    assert 0 < report["time_to_target_s"] <= report["wall_s"] < 60
    copy = report["envs"]["copy-digits"]
    assert copy["reward_mean_first20"] == 0.0 and copy["reward_mean_last20"] > 0.2
    # it may be stopped in the middle of a step
    assert 10 * report["steps"] <= copy["rollouts"] <= 10 * report["steps"] + 10
    assert abs(9 * copy["expired"] - copy["batched"]) <= 9
    assert set(report["versions"]) == {"kafka", "vllm", "levanter", "jax", "streamrl", "python"}


# Has the terminal that is its input for its controlling terminal, and becomes another command.
ON_A_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


def terminal(
    command: list[str], environment: dict[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command on a terminal of its own. Returns its process and the terminal.

    Not by `pty.fork`: Python does not go on safely in the fork of a process with JAX's threads.
    """
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL, *command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=REPOSITORY,
        env=environment,
        start_new_session=True,
    )
    os.close(slave)
    return process, master


@pytest.mark.parametrize("end", ["ctrl-c", "terminal dies", "kill -9", "down"])
def test_nothing_is_left_behind(end: str, run_file: Path, mark: str):
    command = [*STAGE, "up", str(run_file), "--set", "orchestrator.target=null"]
    process, master = terminal(command, {**os.environ, MARK: mark, "TERM": "xterm"})
    if end != "terminal dies":
        threading.Thread(target=read_all, args=[master], daemon=True).start()
    logs = run_file.parent / "runs" / "staged" / "logs"
    until(lambda: all(last_line(logs / f"{part}.log") for part in PARTS), 120.0)
    # each with a child, the broker with its Java, and the orchestrator
    until(lambda: len(marked(mark)) >= 2 * len(PARTS) + 3)
    if end == "ctrl-c":
        os.write(master, b"\x03")
    elif end == "terminal dies":
        os.close(master)
    elif end == "down":
        said = f"run staged stopped (process {process.pid})\n"
        assert streamrl("", "down", run_file).stdout == said
    else:
        process.kill()
    ended = {"ctrl-c": 130, "terminal dies": 129, "kill -9": -9, "down": 143}
    assert process.wait(patience(60)) == ended[end]
    assert left_after(mark) == []


def read_all(terminal: int) -> None:
    """A terminal that nobody reads would make its writer wait."""
    try:
        while os.read(terminal, 65_536):
            pass
    except OSError:  # the other side is closed
        pass


def test_a_part_that_cannot_run_ends_the_run_with_its_last_words(
    run_file: Path, mark: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(RESTARTS, "1")
    failed = streamrl(
        mark,
        "up",
        run_file,
        "--set",
        "run=doomed",
        "--set",
        "orchestrator.target=null",
    )
    assert failed.returncode == 1
    assert "batcher is given up: ended 2 times within 300 s, last with exit code 1" in failed.stdout
    assert "Last line: out of cues (log: " in failed.stdout
    assert left_after(mark) == []


def test_a_wrong_address_is_one_line(run_file: Path, mark: str):
    failed = streamrl(mark, "up", run_file, "--set", "kafka={bootstrap.servers: '127.0.0.1:1'}")
    assert (
        failed.returncode == 3 and failed.stderr.count("\n") == 1 and "127.0.0.1:1" in failed.stderr
    )
    assert left_after(mark) == []
