"""The quickstart's own run file, its parts killed, or all of it: it still learns to copy, and every
rollout is accounted for.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamrl.batcher import process as batcher
from streamrl.buffer import process as buffer
from streamrl.extensions.recordings.audit import audit
from streamrl.extensions.recordings.replay import replay
from streamrl.stream.local_kafka import connect
from streamrl.stream.log.kafka.log import KafkaLog
from tests.docs.blocks import blocks, commands
from tests.loop.runs import Live, any_part, command_line, live, quickstart
from tests.support.waiting import patience

# the learner last: by then it has a checkpoint
KILLED = ("buffer", "batcher", "env copy-digits", "inference", "broker", "learner")


@pytest.mark.live
def test_killed_and_resumed_it_reaches_its_target(tmp_path: Path):
    settings = quickstart()
    settings["orchestrator"]["target"]["reward"] = 0.5  # the other test goes on to 0.9
    with live(tmp_path, settings) as run:
        run.up()
        run.until(lambda: run.version() >= 5, "version 5", 400)
        assert run.process is not None and any(
            "VLLM" in " ".join(command_line(process)) for process in run.processes()
        )
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        run.nothing_left()

        refused = run.command("up", str(run.file))
        assert (
            refused.returncode != 0
            and "--resume" in refused.stderr
            and "--fresh" in refused.stderr
            and "Traceback" not in refused.stderr
        )

        run.up("--resume")
        report = ends_well(run)
        status = run.command("status", str(run.file))
        assert status.returncode == 0, status.stderr
        assert (
            "batcher" in status.stdout
            and f"v{report['policy_version']}" in status.stdout.replace("version ", "v")
        )
        run.nothing_left()
        check_account(run.run, report)


@pytest.mark.live
@pytest.mark.slow
def test_with_every_part_and_the_broker_killed_it_reaches_its_target_and_the_pages_hold(
    tmp_path: Path,
):
    with live(tmp_path, quickstart()) as run:
        run.up()
        run.until(lambda: run.version() >= 3, "version 3", 400)
        for part in KILLED[:-1]:
            kill_and_go_on(run, part)
        run.until(lambda: run.version() >= 23, "version 23", 240)
        kill_and_go_on(run, "learner")
        check_recomputed(run)
        check_account(run.run, ends_well(run))
        follow_the_pages(run, tmp_path)
        run.nothing_left()


def ends_well(run: Live) -> dict[str, Any]:
    """By itself, at its target, with a report and nothing left running."""
    assert run.wait(700) == 0, run.said()
    run.nothing_left()
    report = run.report()
    check_report(report, run.run.orchestrator.target.reward)
    assert (run.run.directory / "reward.png").stat().st_size > 10_000
    return report


def kill_and_go_on(run: Live, part: str) -> None:
    """SIGKILL, and nobody lends a hand: another process takes its place, and versions go on."""
    killed = run.part(part)
    version = run.version()
    killed.kill()
    run.until(lambda: any_part(run, part, killed.pid), f"another process of {part}", 60)
    run.until(
        lambda: run.version() >= version + 3, f"version {version + 3}, after {part} was killed", 240
    )


def check_recomputed(run: Live) -> None:
    """The learner came back at its checkpoint, and what it trained again has the hashes that were
    announced before.
    """
    said = (run.run.directory / "logs" / "learner.log").read_text()
    resumed = list(re.finditer(r"resumed version (\d+) .* version (\d+) is announced", said))
    assert resumed, said[-2000:]
    # the broker's death may have cost it a life as well
    ends = [*(match.start() for match in resumed[1:]), len(said)]
    for match, end in zip(resumed, ends, strict=True):
        again = [
            int(version)
            for version in re.findall(
                r"version (\d+): trained again, [0-9a-f]+ as announced", said[match.end() : end]
            )
        ]
        due = list(range(int(match[1]) + 1, int(match[2]) + 1))
        assert again == due[: len(again)] and (again == due or end < len(said))
    assert again


def check_report(report: dict, target: float) -> None:
    copy = report["envs"]["copy-digits"]
    assert (
        report["run"] == "quickstart" and report["steps"] >= 25 and report["policy_version"] >= 25
    )
    assert copy["reward_mean_last20"] >= target > 0.2 > copy["reward_mean_first20"]
    assert 0 < report["time_to_target_s"] <= report["wall_s"] + 1
    assert (
        report["logprob_mismatch_tokens"] >= 1000 and 0 < report["logprob_mismatch_max_abs"] <= 1e-4
    )
    assert {"kafka", "vllm", "levanter", "jax"} <= report["versions"].keys() and report["servers"][
        0
    ]["id"] == "inference-0"
    envs = report["envs"].values()
    assert all(0 < env["batched"] <= env["rollouts"] for env in envs)
    assert sum(env["expired"] for env in envs) <= 0.25 * sum(env["rollouts"] for env in envs)


def check_account(run, report: dict) -> None:
    """From the topics of the stopped run: what was published has ended exactly once, and the run
    replays bit for bit.
    """
    parts = [buffer.make_processor(run), batcher.make_processor(run)]
    with connect.connect_or_start(run) as settings:
        log = KafkaLog(settings, run.run)
        account = audit(log, run)
        assert account.balanced, account.problems
        assert account.published == sum(env["rollouts"] for env in report["envs"].values())
        assert [replay(log, part)[0].difference for part in parts] == ["", ""]


def follow_the_pages(run: Live, directory: Path) -> None:
    """docs/replay.md and docs/fork.md, command by command, on this run."""
    there = [
        block
        for page in ("docs/replay.md", "docs/fork.md")
        for block in blocks(page)
        if block.needs in ("", "learner")
    ]
    words = [
        command.words[1:]
        for block in there
        if block.language == "sh"
        for command in commands(block)
    ]
    said = {
        " ".join(command): run.command(*command, timeout_s=400, cwd=directory) for command in words
    }
    assert {command: done.stderr for command, done in said.items() if done.returncode} == {}
    assert (
        "balanced" in said["audit quickstart"].stdout
        and "versions identical" in said["replay hotter --weights"].stdout
    )
    (script,) = [block for block in there if block.language == "python"]
    command = [sys.executable, "-c", script.text]
    changed = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=patience(100),
        cwd=directory,
        env=run.environment,
    )
    assert changed.returncode == script.exit == 1, changed
    assert re.search(
        r"groups\.[a-z-]+\[0\]@\d+: advantages\[0\]: recorded .*, replayed ", changed.stdout
    ), changed
