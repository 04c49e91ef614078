import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamrl.cli.command import cli
from streamrl.config.run_file import RunFile, parse
from streamrl.run.engines import slurm
from streamrl.run.monitoring.verdict import TIME_OVER
from streamrl.run.orchestrator.plan import INTERRUPTED
from streamrl.system.errors import ConfigError, StreamrlError

SETTINGS: dict[str, Any] = {
    "run": "r",
    "envs": {"copy-digits": {"fraction": 0.5}, "add-digits": {}},
    "inference": {"host": "env:HOST", "api_key": "env:KEY", "replicas": 2},
    "placement": {
        "learner": {"nodes": ["trains"], "devices": [0, 1], "cpus": 16, "memory_gib": 64},
        "buffer": {"memory_gib": 4},
        "batcher": {"memory_gib": 0.5},
        "inference": {"nodes": ["serves", "too"], "devices": [4, 5]},
        "env": {"nodes": ["too"], "cpus": 0.75},
    },
}


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return parse({**SETTINGS, "runs_dir": str(tmp_path)})


def directives(script: str) -> list[str]:
    return [
        line.removeprefix("#SBATCH --")
        for line in script.splitlines()
        if line.startswith("#SBATCH") and "=" in line
    ]


def test_a_job_for_each_machine_asks_for_what_its_parts_need(run: RunFile):
    leads, serves, too = slurm.scripts(run, ["r.yaml"]).values()
    assert {"job-name=streamrl.r.trains", "cpus-per-task=18", "mem=70144M", "gres=gpu:2"} <= {
        *directives(leads)
    }
    # The numbers of its GPUs count from 0. Nothing is known of its memory.
    assert {"cpus-per-task=1", "gres=gpu:6"} <= {*directives(serves)}
    assert "--mem" not in serves
    assert {"cpus-per-task=3", "gres=gpu:6"} <= {*directives(too)}
    for script in (leads, serves, too):
        assert {"nodes=1", "ntasks=1", "signal=B:TERM@600"} <= {*directives(script)}
        assert "#SBATCH --requeue\n" in script


def test_every_part_is_in_one_job_and_the_first_job_leads(run: RunFile):
    def line(script: str) -> str:
        return next(line for line in script.splitlines() if "streamrl.cli up" in line)

    leads, serves, too = map(line, slurm.scripts(run, ["r.yaml", "--set=a=b c"]).values())
    assert "up r.yaml '--set=a=b c' --except=inference-0" in leads
    assert leads.count("--except") == 4 and "--only" not in leads
    assert "--only=inference-0" in serves and serves.count("--only") == 1
    assert too.count("--only") == 3 and "--except" not in serves + too
    # A job that was requeued continues the run that it began.
    assert leads.endswith("${SLURM_RESTART_COUNT:+--resume} &")
    assert "resume" not in serves + too
    resumed, *_ = map(line, slurm.scripts(run, ["r.yaml"], resume=True).values())
    assert resumed.endswith(" --resume &") and "RESTART" not in resumed


def test_a_run_that_names_no_machine_is_one_job(tmp_path: Path):
    run = parse({"run": "r", "envs": {"copy-digits": {}}, "runs_dir": str(tmp_path)})
    ((name, script),) = slurm.scripts(run, ["r.yaml"]).items()
    assert name == "streamrl.r" and "cpus-per-task=5" in directives(script)
    assert "exec " in script and "scancel" not in script


@pytest.mark.parametrize(
    ("machine", "code", "left_s", "stops"),
    [
        ("trains", 0, 3600, True),
        ("trains", 1, 3600, True),
        ("serves", 0, 3600, False),
        ("serves", TIME_OVER, 3600, False),
        ("serves", 143, 60, True),  # at its own time limit
        ("serves", 143, 3600, False),  # preempted: Slurm starts it again
        ("serves", 76, 3600, True),
    ],
)
def test_the_end_of_the_lead_and_one_of_another_before_the_end_of_the_run_stop_all_jobs(
    run: RunFile, tmp_path: Path, machine: str, code: int, left_s: int, stops: bool
):
    script = slurm.scripts(run, ["r.yaml"])[f"streamrl.r.{machine}"]
    script = script.replace("streamrl.cli up", f"tests.run.engines.ends_with {code}")
    said = tmp_path / "said"
    command = tmp_path / "scancel"
    command.write_text(f'#!/bin/sh\necho "$@" >> {said}\n')
    command.chmod(0o755)
    environment = f'PATH="{tmp_path}:$PATH" SLURM_JOB_END_TIME=$(($(date +%s) + {left_s}))'
    done = subprocess.run(["bash", "-c", f"export {environment}\n{script}"], check=False)
    assert done.returncode == code
    assert said.exists() == stops
    if stops:
        others = [
            f"streamrl.r.{other}" for other in ("trains", "serves", "too") if other != machine
        ]
        ways = ["--state=PENDING", "--batch --signal=TERM"]
        lines = [line.partition("--name=")[2] for line in said.read_text().splitlines()]
        # `scancel` takes one name.
        assert lines == [f"{other} {way}" for other in others for way in ways]


def test_a_signal_to_a_job_reaches_its_parts_and_the_job_waits_for_them(run: RunFile):
    script = slurm.scripts(run, ["r.yaml"])["streamrl.r.serves"]
    script = script.replace("streamrl.cli up", "tests.run.engines.ends_with 143 --on-signal")
    job = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True)
    assert job.stdout and job.stdout.readline() == "started\n"
    job.terminate()
    assert job.wait() == 143
    assert job.stdout.read() == "ended\n"


def test_the_log_of_a_job_may_have_a_space_and_a_percent_sign_in_its_path(tmp_path: Path):
    run = parse({**SETTINGS, "runs_dir": str(tmp_path / "my runs %j")})
    script = slurm.scripts(run, ["r.yaml"])["streamrl.r.serves"]
    logs = f"{tmp_path}/my runs %%j/r/logs"
    assert f"output='{logs}/streamrl.r.serves.log'" in directives(script)


SBATCH = """#!/bin/sh
echo "$@" >> {directory}/options
name=$(grep job-name)
case $name in *{refused}) exit 1 ;; esac
echo $name >> {directory}/names
echo "$(grep -c . {directory}/names);cluster"
"""


def submit(run: RunFile, directory: Path, refused: str = "none") -> tuple[int, list[str]]:
    """Run the rendered script with a stand-in for `sbatch` that refuses a machine. Returns its exit
    code, and what was cancelled.
    """
    programs = {
        "sbatch": SBATCH.format(directory=directory, refused=refused),
        "scancel": f'#!/bin/sh\necho "$@" >> {directory}/cancelled\n',
    }
    for name, text in programs.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    text = slurm.render(run, ["r.yaml"])
    shell = ["sh", "-c", f'PATH="{directory}:$PATH"\n{text}', "sh", "--partition=gpu"]
    done = subprocess.run(shell, check=False)
    cancelled = directory / "cancelled"
    return done.returncode, cancelled.read_text().split() if cancelled.exists() else []


def test_what_is_rendered_submits_every_job_with_the_options_given(run: RunFile, tmp_path: Path):
    assert submit(run, tmp_path) == (0, [])
    names = [f"#SBATCH --job-name=streamrl.r.{name}" for name in ("trains", "serves", "too")]
    assert (tmp_path / "names").read_text().splitlines() == names
    options = (tmp_path / "options").read_text().splitlines()
    assert options == ["--parsable --partition=gpu"] * 3
    assert (run.directory / "logs").is_dir()


def test_what_is_rendered_cancels_what_it_has_submitted_if_a_job_is_refused(
    run: RunFile, tmp_path: Path
):
    assert submit(run, tmp_path, refused="too") == (1, ["1", "2"])


class Jobs:
    """A Slurm in which every question advances the states of two jobs."""

    def __init__(self, *states: tuple[str, str]) -> None:
        self.states = list(states)
        self.commands: list[tuple[str, ...]] = []

    def __call__(self, *command: str) -> str:
        self.commands.append(command)
        if command[0] != "squeue":
            return ""
        first, second = self.states.pop(0)
        if first == "away":
            raise StreamrlError("no answer")
        return "".join(f"{job} {s}\n" for job, s in (("7", first), ("8", second)) if s)


def lines() -> Iterator[str]:
    yield "step 1\n"
    while True:
        yield ""


@pytest.mark.parametrize(
    ("last", "code"), [("COMPLETED", 0), ("FAILED", 1), ("CANCELLED", 1), ("", 1)]
)
def test_a_run_is_followed_until_no_job_is_left(
    last: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    states = [("PENDING", "RUNNING n2"), ("away", ""), ("RUNNING n1", "REQUEUED")]
    jobs = Jobs(*states, ("RUNNING n1", "RUNNING n3"), (last, "COMPLETED"))
    monkeypatch.setattr(slurm, "_slurm", jobs)
    monkeypatch.setattr(slurm, "POLL_S", 0.0)
    assert slurm.follow({"7": "lead", "8": "other"}, lines(), threading.Event()) == code
    assert jobs.states == []
    assert capsys.readouterr().out.splitlines() == [
        "lead (job 7): PENDING",
        "other (job 8): RUNNING n2",
        "step 1",
        "lead (job 7): RUNNING n1",
        "other (job 8): REQUEUED",
        "other (job 8): RUNNING n3",
        f"lead (job 7): {last or 'FORGOTTEN'}",
        "other (job 8): COMPLETED",
    ]


def test_a_stop_ends_pending_jobs_and_asks_running_ones_until_none_is_left(
    monkeypatch: pytest.MonkeyPatch,
):
    states = [("RUNNING n1", "PENDING"), ("COMPLETING n1", "CANCELLED"), ("FAILED", "CANCELLED")]

    class Refusing(Jobs):
        def __call__(self, *command: str) -> str:
            answer = super().__call__(*command)
            if command[0] == "scancel":
                raise StreamrlError("scancel: 1")  # one of the jobs has ended
            return answer

    jobs = Refusing(*states)
    monkeypatch.setattr(slurm, "_slurm", jobs)
    monkeypatch.setattr(slurm, "POLL_S", 0.0)
    stop = threading.Event()
    stop.set()
    assert slurm.follow({"7": "lead", "8": "other"}, lines(), stop) == INTERRUPTED
    asked = [command for command in jobs.commands if command[0] == "scancel"]
    assert asked == len(states) * [
        ("scancel", "--quiet", "--state=PENDING", "7", "8"),
        ("scancel", "--quiet", "--batch", "--signal=TERM", "7", "8"),
    ]


class Submitted:
    """A Slurm that refuses the job of one machine. Jobs end when they are told to."""

    def __init__(self, refused: str = "", stop: threading.Event | None = None) -> None:
        self.refused = refused
        self.stop = stop
        self.jobs: list[str] = []
        self.ended = False

    def __call__(self, *command: str) -> str:
        if command[0] == "sbatch":
            if command[-1].endswith(f"{self.refused}.sbatch") and self.refused:
                raise StreamrlError("sbatch: refused")
            self.jobs.append(command[-1])
            if self.stop:
                self.stop.set()
            return f"{len(self.jobs)}\n"
        if command[0] == "scancel":
            self.ended = True
            return ""
        state = "CANCELLED" if self.ended else "RUNNING"
        return "".join(f"{number + 1} {state} n\n" for number in range(len(self.jobs)))


def test_jobs_are_ended_if_another_one_of_the_run_is_refused(
    run: RunFile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STREAMRL_KAFKA", "kafka:9092")
    monkeypatch.setattr(slurm, "POLL_S", 0.0)
    submitted = Submitted(refused="serves")
    monkeypatch.setattr(slurm, "_slurm", submitted)
    with pytest.raises(StreamrlError, match="sbatch: refused"):
        slurm.up(run, ["r.yaml"], threading.Event())
    assert len(submitted.jobs) == 1 and submitted.ended


def test_a_stop_between_two_jobs_submits_no_further_one_and_ends_the_first(
    run: RunFile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STREAMRL_KAFKA", "kafka:9092")
    monkeypatch.setattr(slurm, "POLL_S", 0.0)
    stop = threading.Event()
    submitted = Submitted(stop=stop)
    monkeypatch.setattr(slurm, "_slurm", submitted)
    assert slurm.up(run, ["r.yaml"], stop) == INTERRUPTED
    assert len(submitted.jobs) == 1 and submitted.ended


def test_a_run_whose_parts_would_not_meet_is_not_submitted(
    run: RunFile, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STREAMRL_KAFKA", "127.0.0.1:9092")
    with pytest.raises(ConfigError, match="Kafka at 127.0.0.1:9092 is reached from its own"):
        slurm.up(run, ["r.yaml"], threading.Event())
    assert not run.directory.exists()


def test_without_slurm_the_error_names_the_command(
    run: RunFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("STREAMRL_KAFKA", "kafka:9092")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StreamrlError, match="sbatch is not installed here"):
        slurm.up(run, ["r.yaml"], threading.Event())


def test_the_engine_excludes_a_choice_of_parts():
    done = CliRunner().invoke(cli, ["up", "r.yaml", "--on", "slurm", "--only", "buffer"])
    assert done.exit_code == 2 and "exclude each other" in done.output
