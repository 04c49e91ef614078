"""`streamrl export-model`: writes a policy version of a run as a model directory that Transformers
and vLLM load.

The weights are copied from the weight store and verified. If the store no longer has them, they are
computed again from the recorded batches, and must have the announced hash.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from streamrl.config.run_file import RunFile
from streamrl.extensions.recordings.output_directory import new_directory
from streamrl.extensions.recordings.progress import OnProgress, no_progress, progress_bar
from streamrl.stream.log.protocol import Log
from streamrl.stream.records import AdapterBase, PolicyVersion
from streamrl.system import hub
from streamrl.system.errors import ConfigError, WeightError
from streamrl.weights.announcements import newest_lineages, read_announcements
from streamrl.weights.manifest import MANIFEST
from streamrl.weights.pull import pull


class ExportedModel(NamedTuple):
    """A model that was written to a directory."""

    version: int
    sha256: str  # the announced hash
    size_bytes: int
    from_store: bool  # False if the weights were computed again


class ModelDestination(NamedTuple):
    """Where an exported model is put: at least one of the two is given."""

    directory: Path | None  # None: it is not kept on this machine.
    repository: str | None  # OWNER/NAME on the Hugging Face hub. None: it is not uploaded.


def export_model_command(
    run: RunFile,
    log: Log,
    version: int | None,
    destination: ModelDestination,
    console: Console,
    adapter: bool = False,
) -> None:
    """Write the model, upload it if `destination` names a repository, and print what it is. Raises
    the errors of `export_model`, and HubError.
    """
    with contextlib.ExitStack() as held:
        directory = destination.directory
        if directory is None:
            directory = Path(held.enter_context(tempfile.TemporaryDirectory())) / "model"
        if destination.repository:
            hub.check_may_push(destination.repository)
        with progress_bar(f"computing version {version}", Console(stderr=True)) as progress:
            model = export_model(run, log, version, directory, progress, adapter)
        how = "from the store" if model.from_store else "computed again from the recorded batches"
        lines = [f"version {model.version} of {run.run}, {how}, sha256 {model.sha256} as announced"]
        if destination.directory:
            lines.append(f"{model.size_bytes / 1e6:,.1f} MB in {directory}")
        if destination.repository:
            message = f"Version {model.version} of the run {run.run}"
            lines.append(hub.push(directory, destination.repository, message))
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def export_model(
    run: RunFile,
    log: Log,
    version: int | None,
    directory: Path,
    progress: OnProgress = no_progress,
    adapter: bool = False,
) -> ExportedModel:
    """Write `version` of the lead learner to `directory`, which appears only when it is complete.

    None means the newest version. A version that is an adapter is merged with its base, unless
    `adapter` asks for the adapter alone.

    Raises ExportError if `directory` exists and is not an empty directory, ConfigError for a
    version that is not announced, InputGone if retention has deleted what is needed, and
    VersionMismatch if the weights do not come out as announced.
    """
    with new_directory(directory) as temporary:
        announced = _announcement(run, log, version, adapter)
        try:
            pull(announced, run.store, temporary)
            (temporary / MANIFEST).unlink()
            from_store = True
        except WeightError:  # The store no longer has the weights, or they are damaged.
            _compute(run, log, announced.version, temporary, progress)
            from_store = False
        if announced.base is not None and not adapter:
            _merge(run, announced.base, temporary)
    return ExportedModel(announced.version, announced.sha256, announced.size_bytes, from_store)


def _announcement(run: RunFile, log: Log, version: int | None, adapter: bool) -> PolicyVersion:
    """The announcement of a version, or of the newest. Raises ConfigError if there is none, or if
    it has no adapter, though that is to be exported.
    """
    announced = newest_lineages(read_announcements(log, run.learner.name))
    newest = max(announced, default=-1)
    if newest < 0:
        raise ConfigError(f"run {run.run} has announced no version yet")
    record = announced.get(newest if version is None else version)
    if record is None:
        raise ConfigError(
            f"--version {version}: that version of {run.learner.name} is not announced in run"
            f" {run.run}; the newest is {newest}"
        )
    if adapter and record.base is None:
        raise ConfigError(
            f"--adapter: version {record.version} of run {run.run} is a whole model; leave it out"
        )
    return record


def _merge(run: RunFile, base: AdapterBase, directory: Path) -> None:
    """Turn the adapter in `directory` into a whole model. Raises WeightError if the store has no
    base.
    """
    # This imports JAX, which exports of whole models do not need.
    from streamrl.learner.adapter_base import write_merged

    with tempfile.TemporaryDirectory() as scratch:
        origin = pull(base, run.store, Path(scratch) / "base", link=True)
        adapter = Path(scratch) / "adapter"
        shutil.move(directory, adapter)
        write_merged(origin, adapter, run.model.max_seq_len, directory)


def _compute(run: RunFile, log: Log, version: int, directory: Path, progress: OnProgress) -> None:
    # This imports JAX, which most exports do not need.
    from streamrl.learner.recompute import recompute_version

    with recompute_version(run, log, version, progress) as policy:
        policy.snapshot().write_model(directory)
