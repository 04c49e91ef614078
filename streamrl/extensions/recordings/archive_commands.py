"""Carries out `streamrl export` and `streamrl import`, and prints what they wrote."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from streamrl.config.run_file import RUN_FILE, RunFile
from streamrl.extensions.recordings.archive import export, import_run, run_file_for_import
from streamrl.extensions.recordings.progress import progress_bar
from streamrl.run.orchestrator.run_directory import lock_run_dir
from streamrl.stream.local_kafka.connect import cluster_settings, connect_or_start
from streamrl.stream.log.parquet import FileLog
from streamrl.stream.log.protocol import Log
from streamrl.system.errors import ConfigError


def export_command(run: RunFile, log: Log, directory: Path, console: Console) -> None:
    """Export a run to `directory` and print how much it is. Raises ExportError."""
    with progress_bar("export", Console(stderr=True)) as progress:
        files = export(log, run, directory, progress)
    console.print(f"{in_words(files)} in {directory}", highlight=False, soft_wrap=True)


def import_command(directory: Path, name: str, console: Console) -> None:
    """Import an export as run `name`, or under its own name if `name` is empty.

    The run gets a directory in runs/. Its topics are on the cluster of STREAMRL_KAFKA, or on its
    own local broker. Raises ConfigError if there is a run of that name.
    """
    files = FileLog(directory)
    run = run_file_for_import(files, name or files.manifest.run)
    if not cluster_settings(run):
        # A cluster that consists of one local broker can keep only one replica.
        run = run.model_copy(update={"topics": run.topics.model_copy(update={"replicas": 1})})
    file = run.directory / RUN_FILE
    if file.exists():
        raise ConfigError(
            f"there is a run {run.run!r} in {run.directory}; take another name with --as"
        )
    with lock_run_dir(run), progress_bar("import", Console(stderr=True)) as progress:
        try:
            with connect_or_start(run, create=True) as kafka:
                import_run(files, run, kafka, progress)
        except BaseException:
            file.unlink()  # Without a run file the name is free again.
            raise
    console.print(
        f"run {run.run}: {in_words(files)}, every record at its old offset",
        highlight=False,
        soft_wrap=True,
    )


def in_words(files: FileLog) -> str:
    """The numbers of topics, records and bytes of an export."""
    topics = files.manifest.topics.values()
    records = sum(partition.count for partitions in topics for partition in partitions)
    return f"{len(topics)} topics, {records:,} records, {files.size_bytes / 1e6:,.1f} MB"
