"""The models and data sets that a run names on the Hugging Face hub. They are downloaded before its
parts start, and its resolved run file names their commits, so that every part and every replay read
the same files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from streamrl.config.run_file import RESOLVED, RunFile, parse
from streamrl.system import hub
from streamrl.system.errors import ConfigError
from streamrl.system.hub import COMMIT, HubName, Kind, Snapshot


class HubSetting(NamedTuple):
    """A setting that names a repository on the hub."""

    path: tuple[str, ...]  # its sections and its name
    name: HubName
    kind: Kind

    def __str__(self) -> str:
        return ".".join(self.path)


def hub_settings(run: RunFile) -> list[HubSetting]:
    """The settings of a run that name repositories on the hub.

    Raises ConfigError for the name of a data set that cannot be one. The path of a model may be
    that of a directory on another machine, so what cannot be a name is left alone.
    """
    data = run.model_dump(mode="json")
    found = list[HubSetting]()
    for path, kind in _candidates(run):
        text = _at(data, path)
        if not text or (kind == "model" and Path(text).is_dir()):
            continue
        name = hub.parse(str(text))
        if name is not None:
            found.append(HubSetting(path, name, kind))
        elif kind == "dataset":
            raise ConfigError(
                f"{'.'.join(path)}: {text!r} is not the name of a data set on the hub; write"
                " OWNER/NAME or OWNER/NAME@REVISION"
            )
    return found


def download(run: RunFile, before: RunFile | None = None) -> tuple[RunFile, list[Snapshot]]:
    """The run with the commit of each repository that it names, and the repositories' files, which
    are then all on this machine.

    `before`: the same run as it was started. A name without a revision keeps the commit that it had
    then. Raises ConfigError as `hub_settings` does, ModelError for the path of a model that is
    neither a directory nor a name, and HubError as `hub.fetch` does.
    """
    started = before.model_dump(mode="json") if before else {}
    data = run.model_dump(mode="json")
    for path, kind in _candidates(run):
        if kind == "model" and _at(data, path) and hub.parse(_at(data, path)) is None:
            hub.model_directory(_at(data, path), ".".join(path))
    snapshots = list[Snapshot]()
    for setting in hub_settings(run):
        earlier = hub.parse(str(_at(started, setting.path)))
        keeps = not setting.name.revision and earlier and earlier.repo == setting.name.repo
        snapshot = hub.fetch(earlier if earlier and keeps else setting.name, setting.kind)
        snapshots.append(snapshot)
        *sections, last = setting.path
        _at(data, sections)[last] = str(snapshot.name)
    return (parse(data, "run file", RESOLVED) if snapshots else run), snapshots


def check_commits(run: RunFile) -> None:
    """Check that each repository of the hub is named by its commit, because every part that is
    started by hand looks for it by itself. Raises ConfigError.
    """
    for setting in hub_settings(run):
        if not COMMIT.fullmatch(setting.name.revision):
            raise ConfigError(
                f"{setting}: parts that are started by hand could read different commits of"
                f" {setting.name}; run `streamrl fetch RUN.yaml`, and write the commit that it"
                " prints"
            )


def _candidates(run: RunFile) -> Iterator[tuple[tuple[str, ...], Kind]]:
    """The settings that may name something on the hub."""
    yield ("model", "path"), "model"
    yield ("learner", "kl", "reference", "path"), "model"
    yield ("learner", "teacher"), "model"
    for pool in run.inference.pools:
        yield ("inference", "pools", pool, "model"), "model"
    for name, env in run.envs.items():
        if (env.kind or name) == "dataset":
            yield ("envs", name, "params", "hub"), "dataset"
    for name, held_out in run.eval.envs.items():
        posed = run.envs.get(held_out.env or name)
        if posed is not None and (posed.kind or held_out.env or name) == "dataset":
            yield ("eval", "envs", name, "params", "hub"), "dataset"


def _at(data: Any, path: tuple[str, ...] | list[str]) -> Any:
    """The value at a path, or an empty text."""
    for key in path:
        data = data.get(key, "") if isinstance(data, Mapping) else ""
    return data
