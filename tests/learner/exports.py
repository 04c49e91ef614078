"""A version of a model on 8 devices, those of two processes that meet at the coordinator:

    python -m tests.learner.exports MODEL DIRECTORY FILE_BYTES COORDINATOR PROCESS

The first process writes DIRECTORY/0, with what the second hands over. Each writes what it held to
DIRECTORY/PROCESS.json.
"""

from __future__ import annotations

import json
import sys
import weakref
from pathlib import Path
from typing import Any

import jax

from streamrl.config.sections.learner import Learner
from streamrl.learner import export, model
from streamrl.learner.staging import StagedFiles, staging_directory
from streamrl.learner.update import Updater
from tests.learner.conftest import CONTEXT


def main(origin: str, directory: str, file_bytes: str, coordinator: str, process: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, int(process))
    assert jax.device_count() == 8
    export.SHARD_BYTES = int(file_bytes)
    gather = export.process_allgather
    gathered: list[weakref.ref[Any]] = []
    most = 0

    def counted(tensor: Any, tiled: bool) -> Any:
        nonlocal most
        found = gather(tensor, tiled=tiled)
        gathered.append(weakref.ref(found))
        most = max(most, sum(each() is not None for each in gathered))
        return found

    export.process_allgather = counted
    settings = Learner()
    with Updater(settings, 8).training():
        weights = export.local_weights(model.load(Path(origin), CONTEXT, settings))
    out = Path(directory)
    staged = StagedFiles(staging_directory(out, version=1), list(weights.files))

    def write(target: Path) -> None:
        export.save_local(weights, Path(origin), target)

    if process == "0":
        write(out / "0")
        staged.collect(out / "0")
        staged.remove()
    else:
        staged.hand_over(write)
    said = {
        "own": weights.own_files,
        "tensors": len(weights.tensors),
        "bytes": sum(tensor.nbytes for tensor in weights.tensors.values()),
        "held": most,
    }
    (out / f"{process}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
