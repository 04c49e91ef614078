"""The base of adapters, for servers: the files of the model that training begins with,
and a random adapter whose logprobs are known.

A new adapter changes nothing, and one of the first versions little. A server that ignores adapters
would pass their probes. So before its first version a server is probed with the random adapter,
which changes logprobs visibly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from streamrl.config.sections.learner import Lora
from streamrl.learner import adapters
from streamrl.learner.adapters import AdapterFormat
from streamrl.learner.files import export
from streamrl.learner.model import model
from streamrl.learner.parallel.mesh import use_mesh
from streamrl.stream.records import AdapterBase, AdapterCheck, Probe
from streamrl.system.errors import ModelError
from streamrl.weights.bases import BASE, CHECK, base_store
from streamrl.weights.files import hash_file, parallel_map
from streamrl.weights.manifest import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    Manifest,
    WeightFile,
    tokenizer_files,
)

MIN_EFFECT = 0.1  # nats, of the largest change of a logprob in the probe
TOLERANCES = 4  # The change is also larger than so many times what a probe may be off.
MEAN_TOLERANCES = 2  # and the mean change than so many times: in bf16 the mean is bounded.
FIRST_SCALE = 2**-10  # Standard deviation of B. It is doubled until the change is large enough.
MAX_DOUBLINGS = 24


class RandomAdapter(NamedTuple):
    """A random adapter, and the learner's logprobs with it."""

    tensors: Mapping[str, np.ndarray]
    probe: Probe


def random_adapter(
    base: Any, settings: Lora, seed: int, probe: Callable[[Any], Probe], tolerance: float
) -> RandomAdapter:
    """An adapter of the base that changes its logprobs by more than a probe may be off. The same
    seed gives the same adapter. Raises ModelError.

    `probe`: computes a model's logprobs of some tokens; `tolerance`: inference.probe_tolerance.
    """
    adapted = adapters.attach(base, settings, seed)
    plain = probe(adapted).logprobs
    effect = max(MIN_EFFECT, TOLERANCES * tolerance)
    for doubling in range(MAX_DOUBLINGS):
        changed = adapters.randomized(adapted, seed, FIRST_SCALE * 2**doubling)
        result = probe(changed)
        change = np.abs(result.logprobs - plain)
        if change.max() >= effect and change.mean() >= MEAN_TOLERANCES * tolerance:
            return RandomAdapter(adapters.state_dict(changed), result)
    raise ModelError(
        f"adapters of {', '.join(settings.targets)} change no logprob by {effect:g}: servers"
        " could not be checked for whether they apply them; give learner.lora.targets more layers"
    )


def publish_base(
    origin: Path, form: AdapterFormat, check: RandomAdapter, store_root: str
) -> AdapterBase:
    """Put the base and its check into the run's store, unless they are there. Raises WeightError.

    `origin`: the directory of the model that training begins with.
    """
    store = base_store(store_root)
    base = store.ref(BASE, form.base)
    if not store.holds(base):
        base = store.put(BASE, partial(write_base, origin), form.base.size_bytes)
    written = store.put(CHECK, partial(adapters.save, check.tensors, form))
    return AdapterBase(**base._asdict(), check=AdapterCheck(**written._asdict(), probe=check.probe))


class ServedFiles(NamedTuple):
    """The files of a model directory that a server may have."""

    copied: list[Path]  # below the model directory, as they are
    config: bytes  # config.json without what loads Python code


def write_merged(base: Path, adapter: Path, max_seq_len: int, directory: Path) -> None:
    """Write base and adapter as one model. `base` and `adapter` are their directories,
    `max_seq_len` is model.max_seq_len. Raises ModelError and OSError.
    """
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    scale = config["lora_alpha"] / config["r"]
    with use_mesh():
        tensors = export.state_dict(model.load(base, max_seq_len))
    export.save(adapters.merged(tensors, load_file(adapter / ADAPTER), scale), base, directory)


def served_files(origin: Path) -> ServedFiles:
    """The files of the initial model in `origin`. Raises OSError."""
    settings = json.loads((origin / CONFIG).read_bytes())
    settings.pop("auto_map", None)
    tensors = sorted(origin.glob("*.safetensors"))
    index = [origin / INDEX] if (origin / INDEX).is_file() else []
    copied = [*tensors, *index, *(origin / name for name in tokenizer_files(origin))]
    return ServedFiles(copied, (json.dumps(settings, indent=1, sort_keys=True) + "\n").encode())


def write_base(origin: Path, directory: Path) -> None:
    """Write the base to `directory`. Raises OSError."""
    files = served_files(origin)
    export.copy_files(origin, _names(origin, files.copied), directory)
    (directory / CONFIG).write_bytes(files.config)


def base_manifest(origin: Path) -> Manifest:
    """The manifest of what `write_base` writes. Raises OSError."""
    files = served_files(origin)
    config = WeightFile(CONFIG, len(files.config), hashlib.sha256(files.config).hexdigest())
    names = _names(origin, files.copied)
    served = [config, *parallel_map(lambda name: hash_file(origin / name, name), names)]
    return Manifest(tuple(sorted(served, key=lambda file: file.name)))


def _names(origin: Path, paths: Sequence[Path]) -> list[str]:
    """The names that files of a model directory have in its manifest."""
    return [path.relative_to(origin).as_posix() for path in paths]
