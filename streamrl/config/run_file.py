"""The run file: every setting of a run, and how a run file is read. Each part gets its own frozen
section, which is in `sections/` with the unit and the default of its settings.

Unknown keys, wrong types and settings that cannot work together (`checks/`) raise a ConfigError
that names the key, and the nearest valid one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import (
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from streamrl.config import checks, presets, topology
from streamrl.config.choices import MULTI_TURN_ENVS, NAME
from streamrl.config.extensions import extensions
from streamrl.config.plugins import imports_in, plugins
from streamrl.config.sections.batches import Batcher, Buffer
from streamrl.config.sections.envs import Env, EnvChoice
from streamrl.config.sections.learner import Learner, Model, Schedule
from streamrl.config.sections.operation import Fork, Metrics, Orchestrator, Placement, Topics
from streamrl.config.sections.section import Section, sections_in
from streamrl.config.sections.serving import Eval, Inference, Weights
from streamrl.system.errors import ConfigError
from streamrl.system.text import nearest, one_line
from streamrl.system.yaml_reader import from_yaml

# The file has every setting, as a run keeps it: nothing is filled up. A key of such a file, and the
# context of a validation.
RESOLVED = "resolved"
RUN_FILE = "run.yaml"  # Name of the resolved run file in the run's directory.
S = TypeVar("S", bound=Section)


class RunFile(Section):
    # Name of the run, of its topics and of its directory: lowercase letters, digits and '-'.
    run: str
    # librdkafka settings of an existing cluster, with secrets as env:NAME. Empty: a local broker in
    # the run's directory.
    kafka: dict[str, Any] = {}
    runs_dir: str = "runs"  # The run's directory is <runs_dir>/<run>.
    # MODULE:NAME that the run's journals may name, in addition to those in this file, such as one
    # that it used before.
    imports: list[str] = []
    # By name. Envs `FAMILY--NAME` share the topics of their rollouts and groups.
    envs: dict[str, EnvChoice]
    buffer: Buffer = Buffer()
    batcher: Batcher = Batcher()
    model: Model = Model()
    learner: Learner = Learner()
    weights: Weights = Weights()
    inference: Inference = Inference()
    eval: Eval = Eval()
    orchestrator: Orchestrator = Orchestrator()
    metrics: Metrics = Metrics()
    topics: Topics = Topics()
    # Machines and GPUs of the parts that `streamrl up` starts, by the name of a role (learner,
    # inference, env) or of a part (inference-0). A part that is not named sees no GPU. Empty: all
    # see all.
    placement: dict[str, Placement] = {}
    fork: Fork | None = None

    @field_validator("run")
    @classmethod
    def _run_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(f"{value!r} is not a name of lowercase letters, digits and '-'")
        return value

    @model_validator(mode="before")
    @classmethod
    def _resolved(cls, data: Any, info: ValidationInfo) -> Any:
        """The settings of the file, filled up with those of its preset and those for a pretrained
        model.
        """
        if info.context == RESOLVED or not isinstance(data, dict):
            return data
        return presets.resolve(data)

    @model_validator(mode="after")
    def _schedule_over_all_steps(self) -> RunFile:
        """A schedule without a number of steps goes over all steps of the run. The number is not
        among the schedule's `model_fields_set` then, so that a resume can tell it from a given one.
        """
        schedule = self.learner.schedule
        steps = self.orchestrator.max_steps
        if schedule is None or schedule.steps or not steps:
            return self
        values = {**dict(schedule), "steps": steps}
        filled = Schedule.model_construct(schedule.model_fields_set - {"steps"}, **values)
        learner = self.learner.model_copy(update={"schedule": filled})
        return self.model_copy(update={"learner": learner})

    @model_validator(mode="after")
    def _with_shares(self) -> RunFile:
        return self.with_shares()

    @model_validator(mode="after")
    def _works_together(self, info: ValidationInfo) -> RunFile:
        for problem in checks.problems(self, resolved=info.context == RESOLVED):
            raise ValueError(problem)
        return self

    def settings_of(self, section: type[S]) -> S:
        """The section that an extension has in the run file, by its type."""
        return next(value for _, value in self if isinstance(value, section))

    def with_shares(self) -> RunFile:
        """The run in which parts that meet on a GPU have a share of its memory, also where the file
        gives none.
        """
        placement = dict(self.placement)
        pools: dict[str, float] = {}
        shares = topology.default_shares(self)
        for part in topology.parts(self):
            share = shares.get(part.name)
            if share is None:
                continue
            name = part.name if part.name in placement else part.role
            if topology.is_server(part):
                pool = topology.pool_of(part)
                pools[pool] = min(share, pools.get(pool, share))
            elif not self.placement[name].memory_fraction:
                least = min(share, placement[name].memory_fraction or share)
                placement[name] = placement[name].model_copy(update={"memory_fraction": least})
        inference = self.inference.with_memory(pools)
        return self.model_copy(update={"placement": placement, "inference": inference})

    @property
    def max_samples(self) -> int:
        """The largest number of answers to one prompt that a part asks a server for."""
        groups = [self.buffer_of(name).group_size for name in self.envs]
        return max([1, *groups, *(env.samples for env in self.eval.envs.values())])

    def of_pool(self, pool: str) -> RunFile:
        """The run as the servers of a pool see it: with the settings of their pool."""
        return self.model_copy(update={"inference": self.inference.of_pool(pool)})

    def without_guests(self) -> RunFile:
        """The run as a server sees it that serves no other runs."""
        inference = self.inference.model_copy(update={"also_serves": {}})
        return self.model_copy(update={"inference": inference})

    def buffer_of(self, env: str) -> Buffer:
        """The rules of the buffer for an env: its own, and for the rest those of all."""
        return self.buffer.model_copy(update=self.envs[env].buffer.given)

    @property
    def session_envs(self) -> tuple[str, ...]:
        """The envs whose rollouts agents make through the gateway."""
        return tuple(name for name, env in self.envs.items() if env.sessions)

    @property
    def turn_envs(self) -> tuple[str, ...]:
        """The envs whose model calls are recorded, by the gateway or by their own replicas."""
        return tuple(
            name for name, env in self.envs.items() if env.sessions or self.records_turns(name)
        )

    def records_turns(self, name: str) -> bool:
        """Whether replicas of this env record their model calls. An env that is not shipped counts
        as one with several turns, because only its process knows whether it has them.
        """
        env = self.envs[name]
        if not isinstance(env, Env) or env.max_turns == 1 or not env.replicas:
            return False
        kind = env.kind or name
        return ":" in kind or kind in MULTI_TURN_ENVS or kind in plugins("streamrl.envs")

    @property
    def imported(self) -> frozenset[str]:
        """Every MODULE:NAME in this file."""
        return frozenset(imports_in(self.model_dump(mode="json", exclude={"kafka"})))

    @property
    def directory(self) -> Path:
        """The run's own directory."""
        return Path(self.runs_dir).absolute() / self.run

    @property
    def store(self) -> str:
        """URI of the run's weights (fsspec's: nothing is percent-encoded). Runs that share a store
        have different directories in it.
        """
        return (
            f"{self.weights.store.rstrip('/')}/{self.run}"
            if self.weights.store
            else f"file://{self.directory / 'weights'}"
        )

    def to_json(self) -> str:
        return json.dumps(self.model_dump(mode="json"), indent=1)


if not TYPE_CHECKING:
    # With the sections of extensions, which read them by `settings_of`.
    added = {
        name: (extension.section, extension.section())
        for name, extension in extensions().items()
        if extension.section
    }
    RunFile = create_model("RunFile", __base__=RunFile, __module__=__name__, **added)


def load(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunFile:
    """Read a run file; `overrides` are `learner.learning_rate=1e-3`, parsed as YAML. Raises
    ConfigError.
    """
    return load_with_origin(path, overrides)[0]


def load_with_origin(
    path: str | Path, overrides: list[str] | tuple[str, ...] = ()
) -> tuple[RunFile, bool]:
    """As `load`, and whether the file is one that a run keeps in its directory."""
    data = _read(path)
    is_resolved = data.pop(RESOLVED, False) is True
    for override in with_preset(overrides) if is_resolved else overrides:
        _set(data, override)
    return parse(data, str(path), RESOLVED if is_resolved else ""), is_resolved


def _read(path: str | Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); give the path of a run file, or"
            " write one: streamrl new NAME"
        ) from None
    try:
        data = from_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {one_line(error, 1_000)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a run file is a map of settings, not {type(data).__name__}")
    return data


def with_overrides(run: RunFile, overrides: Sequence[str]) -> RunFile:
    """The run with these settings replaced, as `load` takes them. Raises ConfigError."""
    data = run.model_dump(mode="json")
    for override in with_preset(overrides):
        _set(data, override)
    return parse(data, f"--set {' '.join(overrides)}") if overrides else run


def with_preset(overrides: Sequence[str]) -> list[str]:
    """The overrides of a run file that contains all settings. A preset among them comes with all of
    its settings, before the others.
    """
    chosen = [o.partition("=")[2] for o in overrides if o.startswith("learner.preset=")]
    return [*(setting for name in chosen for setting in presets.settings_of(name)), *overrides]


def parse_resolved(data: dict[str, Any], where: str) -> RunFile:
    """The run file of a run, which has every setting. Raises ConfigError."""
    return parse(data, where, RESOLVED)


def parse(data: dict[str, Any], where: str = "run file", context: str = "") -> RunFile:
    try:
        return RunFile.model_validate(data, context=context)
    except ValidationError as error:
        raise ConfigError(
            f"{where}: " + "; ".join(_explain(problem) for problem in error.errors())
        ) from None


def _set(data: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override}: write it as section.key=value")
    *parents, last = path.split(".")
    for parent in parents:
        if data.get(parent) is None:
            data[parent] = {}
        child = data[parent]
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {parent} is not a section")
        data = child
    try:
        data[last] = from_yaml(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: not YAML: {one_line(error, 1_000)}") from None


def _explain(problem: Any) -> str:
    """One line for a problem: the key, what is wrong, and the nearest key that exists."""
    keys, section = _walk(problem["loc"])
    path = ".".join(str(key) for key in keys)
    if problem["type"] != "extra_forbidden":
        what = problem["msg"].removeprefix("Value error, ")
        return f"{path}: {what}" if path else what
    key = keys[-1]
    valid = list(section.model_fields)
    if near := nearest(str(key), valid, 0.5):
        return f"unknown key {path!r}; did you mean {near!r}?"
    return f"unknown key {path!r}; valid keys: {', '.join(valid)}"


def _walk(location: Sequence[Any]) -> tuple[list[Any], type[Section]]:
    """The keys, names and indices of a problem's location, and the section that the last of them is
    in. The location also has the tags of sections that a setting may be.
    """
    section: type[Section] = RunFile
    annotation: Any = RunFile
    keys: list[Any] = []
    for key in location:
        choices = sections_in(annotation)
        if get_origin(annotation) in (dict, list):
            annotation = get_args(annotation)[-1]
        elif key in choices:
            annotation = choices[key]
            continue
        elif "" in choices:
            section = choices[""]
            field = section.model_fields.get(key)
            annotation = field.annotation if field else None
        keys.append(key)
    return keys, section
