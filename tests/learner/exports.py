"""A version of a model on 8 devices, those of two processes that meet at the coordinator:

    python -m tests.learner.exports MODEL DIRECTORY FILE_BYTES COORDINATOR PROCESS

The first process writes DIRECTORY/0, with what the second stages. Each says in
DIRECTORY/PROCESS.json what it held, and the first one which shards were handed over.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax

from streamrl.config.sections.learner import Learner
from streamrl.learner.files import export
from streamrl.learner.files.staging import StagedFiles, staging_directory
from streamrl.learner.model import model
from streamrl.learner.update import Updater
from tests.learner.conftest import CONTEXT


def main(origin: str, directory: str, file_bytes: str, coordinator: str, process: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, 2, int(process))
    assert jax.device_count() == 8
    export.SHARD_BYTES = int(file_bytes)
    settings = Learner()
    with Updater(settings, 8, CONTEXT).training():
        weights = export.local_weights(model.load(Path(origin), CONTEXT, settings))
    out = Path(directory)
    staged = StagedFiles(staging_directory(out, version=1), weights)
    said = {
        "files": weights.files_of(int(process)),
        "bytes": sum(copy.nbytes for copy in weights.copies.values()),
    }
    if process == "0":
        staged.exchange_shards()
        export.save_settings(weights, Path(origin), out / "0")
        weights.write_files(out / "0", staged.shards)
        staged.gather_files(out / "0")
        said["handed_over"] = sorted(path.name for path in staged.shards.iterdir())
        staged.remove()
    else:
        staged.stage_own_files()
    (out / f"{process}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
