"""A run on Slurm: a job for each machine that `placement` names.

A job is `streamrl up` with the parts of its machine, which starts a part again within a second. A
job whose node is lost is requeued by Slurm, and the parts of the other jobs continue meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from streamrl.config.run_file import RunFile
from streamrl.run.engines.commands import output
from streamrl.run.engines.machines import RUN_OVER, machines, prepare
from streamrl.run.orchestrator.plan import INTERRUPTED, LEARNER_STOP_LIMIT_S
from streamrl.system.errors import StreamrlError

POLL_S = 2.0
SIGNAL_S = 60  # by which a signal before the time limit may come earlier
# What is submitted by a shell script that fails, or is interrupted, is cancelled at its end.
SUBMIT = """set -e
jobs=
trap 'test $? = 0 || test -z "$jobs" || scancel $jobs' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
submit() {
  job=$(sbatch --parsable "$@")
  jobs="$jobs ${job%%;*}"
  echo "job ${job%%;*}"
}"""
RUNS = ("", "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED", "NODE_FAIL")


def scripts(run: RunFile, arguments: Sequence[str], resume: bool = False) -> dict[str, str]:
    """The batch script of each machine, by the name of its job. The first one leads.

    `arguments`: the run file and options of `streamrl up`, as they are on the command line.
    """
    wanted = machines(run, arguments)
    rendered: dict[str, str] = {}
    for name, command, request, leads in wanted:
        others = [other.name for other in wanted if other.name != name]
        line = shlex.join(command)
        if leads:
            line += " --resume" if resume else " ${SLURM_RESTART_COUNT:+--resume}"
        options = [
            f"--job-name={name}",
            "--nodes=1",
            "--ntasks=1",
            f"--cpus-per-task={math.ceil(request.cpus)}",
            *([f"--mem={round(request.memory_gib * 1024)}M"] if request.memory_gib else []),
            *([f"--gres=gpu:{request.gpus}"] if request.gpus else []),
            "--requeue",
            # A learner finishes its step and writes a checkpoint before the time limit.
            f"--signal=B:TERM@{LEARNER_STOP_LIMIT_S:.0f}",
            "--open-mode=append",
            f"--output={_file_pattern(log_file(run, name))}",
        ]
        rendered[name] = "\n".join(
            ["#!/bin/bash"]
            + [f"#SBATCH {option}" for option in options]
            + ['export STREAMRL_INFERENCE_HOST="${STREAMRL_INFERENCE_HOST:-$(hostname)}"']
            + (_until_the_end(line, others, leads) if others else [f"exec {line}"])
            + [""]
        )
    return rendered


def _until_the_end(line: str, others: Sequence[str], leads: bool) -> list[str]:
    """The lines that run a machine's parts, and stop the jobs of the `others` when the run is over,
    or when the machine has ended without seeing its end.
    """
    which = '--quiet --user="$(id -un)" --name=$job'
    stop = [
        f"for job in {' '.join(others)}; do",
        f"  scancel {which} --state=PENDING",
        f"  scancel {which} --batch --signal=TERM",
        "done",
    ]
    if not leads:
        over = " | ".join(map(str, RUN_OVER))
        near_s = round(LEARNER_STOP_LIMIT_S + SIGNAL_S)
        at_limit = f'test "${{SLURM_JOB_END_TIME:-0}}" -le $(($(date +%s) + {near_s}))'
        stop = [
            "case $code in",
            f"{over}) stops_others=false ;;",
            # Told to end: at the job's own time limit, or preempted, and Slurm starts it again.
            f"143) if {at_limit}; then stops_others=true; else stops_others=false; fi ;;",
            "*) stops_others=true ;;",
            "esac",
            "if $stops_others; then",
            *stop,
            "fi",
        ]
    return [
        f"{line} &",
        "trap 'kill -TERM $!' TERM",
        "wait $!",
        "code=$?",
        # A signal ends the first `wait`.
        "while kill -0 $! 2>/dev/null; do wait $!; code=$?; done",
        # Jobs that were told to end tell the others in turn.
        "trap '' TERM",
        *stop,
        "exit $code",
    ]


def log_file(run: RunFile, name: str) -> Path:
    """Where the output of a job is. It is among the logs of the run's parts."""
    return run.directory / "logs" / f"{name}.log"


def _file_pattern(path: Path) -> str:
    """A path as an option of `sbatch` in a script has it, in which % begins a replacement."""
    return shlex.quote(str(path).replace("%", "%%"))


def render(run: RunFile, arguments: Sequence[str]) -> str:
    """A shell script that submits the jobs of a run, with the options of `sbatch` that it is given:
    all of them, or none.
    """
    jobs = [f"submit \"$@\" <<'END'\n{script}END" for script in scripts(run, arguments).values()]
    return "\n".join([SUBMIT, f"mkdir -p {shlex.quote(str(run.directory / 'logs'))}", *jobs, ""])


def up(
    run: RunFile,
    arguments: Sequence[str],
    stop: threading.Event,
    resume: bool = False,
    fresh: bool = False,
) -> int:
    """Submit the jobs of a run, follow them until all have ended, or until `stop`, which stops
    them. Returns the exit code. The scripts are kept in the run's directory. Where not all can be
    submitted, those that were are ended.
    """
    prepare(run, fresh)
    rendered = scripts(run, arguments, resume)
    lines = _lines(log_file(run, next(iter(rendered))))
    jobs: dict[str, str] = {}
    try:
        for name, script in rendered.items():
            if stop.is_set():
                break
            file = run.directory / f"{name}.sbatch"
            file.write_text(script)
            jobs[_slurm("sbatch", "--parsable", str(file)).partition(";")[0].strip()] = name
    except StreamrlError:
        if jobs:
            print("not all jobs could be submitted: the others are ended", flush=True)
            ended = threading.Event()
            ended.set()
            follow(jobs, lines, ended)
        raise
    return follow(jobs, lines, stop)


def follow(jobs: dict[str, str], lines: Iterator[str], stop: threading.Event) -> int:
    """Show the states of the jobs and the `lines` of the first, which leads."""
    states = dict.fromkeys(jobs, "")
    while any(state.partition(" ")[0] in RUNS for state in states.values()):
        for job, state in _states(jobs).items():
            if states[job] != state:
                states[job] = state
                print(f"{jobs[job]} (job {job}): {state}", flush=True)
        for line in takewhile(bool, lines):
            print(line, end="", flush=True)
        if stop.is_set():
            _ask_to_end(jobs)
            time.sleep(POLL_S)
        stop.wait(POLL_S)
    if stop.is_set():
        return INTERRUPTED
    return 0 if next(iter(states.values())).startswith("COMPLETED") else 1


def _ask_to_end(jobs: Iterable[str]) -> None:
    """Cancel the jobs that have not begun, and have the others end their parts. It is repeated
    until none is left: `scancel` fails while Slurm does not answer, and where a job has ended
    already.
    """
    for which in (["--state=PENDING"], ["--batch", "--signal=TERM"]):
        with contextlib.suppress(StreamrlError):
            _slurm("scancel", "--quiet", *which, *jobs)


def _states(jobs: Iterable[str]) -> dict[str, str]:
    """State and node of each of the jobs; none while Slurm does not answer."""
    try:
        shown = _slurm(
            "squeue",
            "--noheader",
            "--states=all",
            f"--jobs={','.join(jobs)}",
            "--format=%i %T %N",
        )
    except StreamrlError:
        return {}
    known = dict(line.strip().split(" ", 1) for line in shown.splitlines())
    return {job: known.get(job, "FORGOTTEN") for job in jobs}


def _lines(path: Path) -> Iterator[str]:
    """The lines that a file gets from now on, with an empty one where there is no further one
    yet.
    """
    start = path.stat().st_size if path.exists() else 0
    yield ""
    while not path.exists():
        yield ""
    with path.open(errors="replace") as file:
        file.seek(start)
        while True:
            yield file.readline()


def _slurm(*command: str) -> str:
    """The output of a command of Slurm. Raises StreamrlError with what it complains of."""
    return output(command, hint="; run this where Slurm is")
