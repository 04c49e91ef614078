"""The directory of a run, `runs/<run>/`: the resolved run file, logs, report and reward curve.

An orchestrator locks it, so that only one works on a run at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname
from typing import IO

import yaml

from streamrl.config import run_file
from streamrl.config.run_file import RESOLVED, RUN_FILE, RunFile
from streamrl.run.orchestrator.resuming import refusals
from streamrl.stream.local_kafka import broker, connect
from streamrl.system.errors import ConfigError, StreamrlError
from streamrl.system.files import write_atomically

ARCHIVE = "archive"
LOCK = ".lock"


def resolve_run(name: str, overrides: tuple[str, ...] = (), runs_dir: str = "runs") -> RunFile:
    """Load the run that a command line names: by the path of a run file or by a name in `runs/`.

    Raises ConfigError if there is no such run.
    """
    path = Path(name)
    if not path.is_file() and (known := Path(runs_dir) / name / RUN_FILE).is_file():
        path = known
    elif not path.exists() and not path.suffix and os.sep not in name:
        others = ", ".join(names(runs_dir)) or "none"
        file = path.with_suffix(".yaml")
        hint = f"{file} is a run file" if file.is_file() else "streamrl new NAME writes a run file"
        raise ConfigError(
            f"{name}: neither a run file nor a run in {runs_dir}/ (there: {others}); {hint}"
        )
    run, is_of_run = run_file.load_with_origin(path, overrides)
    inside = path.absolute().parent
    # The directory of a run that has been moved is the one in which its file is.
    if is_of_run and inside.name == run.run:
        run = run.model_copy(update={"runs_dir": str(inside.parent)})
    return run


def names(runs_dir: str = "runs") -> list[str]:
    """The names of all runs in the directory."""
    return sorted(path.parent.name for path in Path(runs_dir).glob(f"*/{RUN_FILE}"))


def with_env(env: str, runs_dir: str = "runs") -> str:
    """The name of the run that has an env of this name or kind.

    Raises ConfigError unless there is exactly one.
    """
    if Path(env).is_file():
        raise ConfigError(f"{env} is a run file; name one of its envs: streamrl env {env} ENV")
    runs = {name: resolve_run(name, runs_dir=runs_dir) for name in names(runs_dir)}
    matches = [
        name
        for name, run in runs.items()
        if any(env in (own, settings.kind) for own, settings in run.envs.items())
    ]
    if len(matches) != 1:
        which = ", ".join(matches) or "no run"
        raise ConfigError(
            f"{env}: {which} in {runs_dir}/ has an env of that name or kind; name the run: streamrl"
            f" env RUN {env}"
        )
    return matches[0]


@contextlib.contextmanager
def lock_run_dir(run: RunFile, resume: bool = False, fresh: bool = False) -> Iterator[Path]:
    """Make or take over the run's directory and hold its lock for as long as the block lasts.

    Raises StreamrlError if the directory is in use, if it has a run and neither `resume` nor
    `fresh` is given, or if there is no run to resume.
    """
    directory = run.directory
    if resume and fresh:
        raise ConfigError(
            "--resume and --fresh exclude each other: continue the run, or archive it and begin"
            " anew"
        )
    if fresh and run.fork:
        raise ConfigError(
            f"run {run.run!r} is a fork of {run.fork.run!r} and cannot begin anew; fork that one"
            " again, under another name"
        )
    if (directory / RUN_FILE).exists() and not (resume or fresh):
        raise StreamrlError(
            f"run {run.run!r} exists in {directory}; continue it (--resume), or archive it and"
            " begin anew (--fresh)"
        )
    if resume and not directory.exists():
        raise StreamrlError(
            f"there is no run {run.run!r} in {directory} to continue; start it without --resume"
        )
    with contextlib.ExitStack() as held:
        if fresh and directory.exists():
            held.enter_context(_lock(directory))
            if at := broker.find(connect.broker_dir(run)):
                raise StreamrlError(
                    f"a broker is running on {directory} (pid {at.process.pid}); stop it before the"
                    " run is archived"
                )
            archive(directory)
        held.enter_context(_lock(directory))
        before = resolved_run(run) if resume else None
        if before and (problem := next(refusals(before, run), "")):
            raise ConfigError(problem)
        write_run_file(run)
        yield directory


@contextlib.contextmanager
def join_run_dir(run: RunFile, part: str) -> Iterator[Path]:
    """Hold a lock for the `part` that is started here, in the directory of a run that another `up`
    leads. The two may share the directory.
    """
    with _lock(run.directory, f"{LOCK}-{part}"):
        yield run.directory


def resolved_run(run: RunFile) -> RunFile | None:
    """The run as it was started, from the resolved run file in its directory, or None if it has not
    been started yet. Raises ConfigError.
    """
    path = run.directory / RUN_FILE
    if not path.exists():
        return None
    return run_file.load(path)


def archive(directory: Path) -> Path:
    """Move a run, its Kafka data included, to `archive/<run>-<time>` next to it."""
    to = directory.parent / ARCHIVE / f"{directory.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    to.parent.mkdir(parents=True, exist_ok=True)
    return directory.rename(to)


def write_run_file(run: RunFile) -> None:
    """Write the run file, with every default, from which all parts are started.

    Only its owner can read it, although it contains no secret.
    """
    settings = {RESOLVED: True, **run.model_dump(mode="json")}
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    write_atomically(run.directory / RUN_FILE, text, 0o600)


def stop(run: RunFile, limit_s: float = 120.0) -> int:
    """Ask the process that runs this run to end, and wait for it. Returns the process id.

    Raises StreamrlError if there is no such process or it has not ended within `limit_s`.
    """
    with contextlib.suppress(OSError), (run.directory / LOCK).open() as file:
        owner, host = _owner(file)
        deadline = time.monotonic() + limit_s
        if owner and _is_held(file):
            if host and host != gethostname():  # the number names another process here
                raise StreamrlError(
                    f"run {run.run!r} is run by process {owner} of host {host or 'unknown'}, and"
                    f" this is {gethostname()}; stop it there"
                )
            os.kill(owner, signal.SIGTERM)
            while _is_held(file):
                if time.monotonic() > deadline:
                    raise StreamrlError(
                        f"process {owner} has not ended run {run.run!r} within {limit_s:.0f} s; see"
                        f" {run.directory / 'logs'}"
                    )
                time.sleep(0.1)
            return owner
    raise StreamrlError(
        f"nothing runs {run.run!r} in {run.directory}; parts that were started by hand are stopped"
        " where they were started"
    )


def in_use(run: RunFile) -> bool:
    """Whether an orchestrator has locked the run."""
    with contextlib.suppress(OSError), (run.directory / LOCK).open() as file:
        return _is_held(file)
    return False


def _owner(file: IO[str]) -> tuple[int, str]:
    """The id and the host of the process that has locked the run."""
    owner, _, host = file.read().strip().partition(" ")
    return int(owner or 0), host


def _is_held(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


@contextlib.contextmanager
def _lock(directory: Path, name: str = LOCK) -> Iterator[None]:
    """Lock a run's directory. The kernel releases the lock when the process ends."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / name).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner, host = _owner(file)
            raise StreamrlError(
                f"the run in {directory} is in use by process {owner} of {host}; stop that one"
                " first (Ctrl-C, or `kill` it)"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()} {gethostname()}")
        file.flush()
        yield
