"""Policy versions that lie in a run's weight store, made of texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from streamrl.config.run_file import RunFile
from streamrl.stream.records import AdapterBase, AdapterCheck, PolicyVersion, Probe
from streamrl.weights.bases import BASE, CHECK, base_store
from streamrl.weights.store import Store
from tests.inference.servers.test_adapters import BY_THE_BASE, TOKENS


def writes(text: str, rank: int = 4) -> Callable[[Path], None]:
    """Writes a model, or an adapter, that is nothing but a text."""

    def write(directory: Path) -> None:
        directory.joinpath("config.json").write_text("{}")
        shape = {"r": rank, "target_modules": ["q_proj"]}
        directory.joinpath("adapter_config.json").write_text(json.dumps(shape))
        directory.joinpath("adapter_model.safetensors").write_text(text)

    return write


def adapter(run: RunFile, version: int, model: str = "a model", rank: int = 4) -> PolicyVersion:
    """A version in the run's store, which lowers logprobs by 0.5, as the stub does."""
    probe = Probe(tokens=TOKENS, logprobs=BY_THE_BASE - np.float32(0.5))
    bases = base_store(run.store)
    base = bases.put(BASE, writes(model))
    check = bases.put(CHECK, writes(f"check of {run.run}", rank))
    stored = Store(run.store).put(version, writes(f"{run.run}, version {version}"))
    return PolicyVersion(
        learner="lead",
        version=version,
        probe=probe,
        base=AdapterBase(**base._asdict(), check=AdapterCheck(**check._asdict(), probe=probe)),
        **stored._asdict(),
    )


def whole_model(run: RunFile, version: int, text: str = "") -> PolicyVersion:
    stored = Store(run.store).put(version, writes(text or f"version {version}"))
    return PolicyVersion(learner="lead", version=version, **stored._asdict())
