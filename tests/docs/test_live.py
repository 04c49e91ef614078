"""What the pages do with a learner, on a run that one has trained: blocks tagged `needs: learner`,
or `torch`.

And what README says of parts that are started by hand.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.stream.local_kafka import broker, connect
from tests.docs.blocks import PAGES, ROOT, Block, all_blocks, blocks, commands
from tests.loop.runs import Live, live, quickstart
from tests.support.waiting import patience

TUTORIAL = "docs/tutorial.md"
LIMIT_S = 500.0


def is_own(block: Block) -> bool:
    """The tutorial's run file of one's own: it needs nothing of the quickstart."""
    return "mine.yaml" in block.text


@pytest.mark.live
@pytest.mark.slow
def test_what_needs_a_learner_runs_on_a_run_that_has_one(tmp_path: Path):
    settings = quickstart()
    settings["orchestrator"] = {"max_steps": 43}  # the pages fork at 40
    done: list[str] = []
    with live(tmp_path, settings) as run:
        run.up()
        assert run.wait(LIMIT_S) == 0, run.said()
        for block in [
            block
            for page in PAGES
            for block in blocks(page)
            if block.needs in ("learner", "torch") and not is_own(block)
        ]:
            follow(block, run, tmp_path, done)
        run.nothing_left()
    assert len(done) >= 8


@pytest.mark.live
@pytest.mark.slow
def test_the_tutorials_own_run_learns(tmp_path: Path):
    for block in blocks(TUTORIAL):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    with live(tmp_path, quickstart()) as run:  # not started: it is there to clear up
        for block in [
            block for block in all_blocks() if block.needs == "learner" and is_own(block)
        ]:
            follow(block, run, tmp_path, [])
        run.nothing_left()
    assert (tmp_path / "runs" / "mine" / "reward.png").exists()


@pytest.mark.live
@pytest.mark.slow
def test_the_parts_started_by_hand_are_a_run(tmp_path: Path):
    """README, "Run the parts yourself": the commands as they stand there, each in a terminal of its
    own.
    """
    settings = quickstart()
    settings["orchestrator"] = {"max_steps": 3}
    # or nobody would need a scorer
    settings["learner"]["kl"] = {"reference": {"by": "pool"}}
    settings["scorer"] = {"replicas": 1}
    (block,) = [block for block in blocks("README.md") if "streamrl broker RUN.yaml" in block.text]
    with live(tmp_path, settings) as run:
        shutil.copy(run.file, tmp_path / "RUN.yaml")
        parts = [start(command.words, run, tmp_path) for command in commands(block)]
        assert parts[-1].wait(patience(LIMIT_S)) == 0, said(tmp_path)
        for part in reversed(parts):  # the broker last: the others tell it that they go
            part.terminate()
            assert part.wait(patience(LIMIT_S)) == 0, said(tmp_path)
        run.nothing_left()
        assert run.report()["steps"] >= 3


def start(words: list[str], run: Live, directory: Path) -> subprocess.Popen[bytes]:
    """In a terminal of its own; what has to be there before the next command is waited for."""
    with (directory / f"{'-'.join(words[1:])}.log").open("wb") as log:
        command = [sys.executable, "-m", "streamrl.cli", *words[1:]]
        environment = {**run.environment, "PYTHONPATH": str(ROOT)}
        made = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    if words[1] == "broker":
        run.until(
            lambda: (
                made.poll() is not None
                or broker.running_address(connect.broker_dir(run.run)) is not None
            ),
            "the broker answers",
            LIMIT_S,
        )
    if words[1] == "topics":
        assert made.wait(patience(LIMIT_S)) == 0, said(directory)
    return made


def said(directory: Path) -> str:
    return "\n".join(
        f"--- {path.name}\n{path.read_text(errors='replace')[-800:]}"
        for path in sorted(directory.glob("*.log"))
    )


def follow(block: Block, run: Live, directory: Path, done: list[str]) -> None:
    """Do what it says, as a reader of the page; what another page has had done is not done
    again.
    """
    if block.language == "python":
        interpreter = (
            str(run.run.inference.interpreter) if block.needs == "torch" else sys.executable
        )
        execute(block, [interpreter, "-c", block.text], {}, run, directory)
        return
    for command in commands(block):
        if str(command) not in done:
            assert command.words[0] == "streamrl", block
            execute(
                block,
                [sys.executable, "-m", "streamrl.cli", *command.words[1:]],
                command.environment,
                run,
                directory,
            )
            done.append(str(command))


def execute(
    block: Block, words: list[str], own: dict[str, str], run: Live, directory: Path
) -> None:
    environment = {
        **run.environment,
        **own,
        "PYTHONPATH": os.pathsep.join(filter(None, (own.get("PYTHONPATH"), str(ROOT)))),
    }
    ended = subprocess.run(
        words,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(LIMIT_S),
    )
    assert ended.returncode == block.exit, (
        f"{block}: {words[2:]}: {ended.stdout[-3000:]}{ended.stderr[-3000:]}"
    )
