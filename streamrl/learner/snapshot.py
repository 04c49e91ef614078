"""WeightsSnapshot: a copy of a version's weights, which is written while training continues. The
processes of a learner publish a version together:

1. Every process copies the shards of its devices (`PolicyTrainer.snapshot`).
2. They exchange the shards of each other's files (`exchange_shards`).
3. Each writes its own files: rank zero into the store, the others into a staging directory
   (`write_own_files`, `stage_own_files`).
4. Rank zero gathers the others' files into the store (`StagedFiles.gather_files`).
5. Rank zero announces the version (`publisher.py`).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from streamrl.learner import adapters
from streamrl.learner.adapters import AdapterFormat
from streamrl.learner.files import export
from streamrl.learner.files.checkpoints import TrainingPosition
from streamrl.learner.files.staging import StagedFiles
from streamrl.learner.files.weight_shards import LocalWeights
from streamrl.learner.parallel.distributed import is_rank_zero
from streamrl.weights.files import describe
from streamrl.weights.manifest import WeightRef
from streamrl.weights.store import Store


class ExportResult(NamedTuple):
    """Weights that are in the store, and how long that took."""

    stored: WeightRef
    export_s: float  # Writing the files.
    hash_s: float  # Hashing them, and moving them into the store with their manifest.


class WeightsSnapshot(NamedTuple):
    """A copy of a version's weights, of which each process has its shards."""

    position: TrainingPosition  # its sha256 is not known yet
    initial_model_dir: Path  # as in `PolicyTrainer`
    weights: LocalWeights
    vocab_size: int  # token ids that can be trained on are below it
    skipped: bool  # nothing was trained on the batch before it
    # How the tensors of an adapter are written. None: they are those of a whole model.
    adapter: AdapterFormat | None = None
    # Where the other processes write their files. None: this process writes all of them.
    staged: StagedFiles | None = None

    def exchange_shards(self) -> None:
        """Exchange shards with the learner's other processes, before any file is written. Raises
        WeightError.
        """
        if self.staged is not None:
            self.staged.exchange_shards()

    def write_own_files(self, directory: Path, shards: Path) -> None:
        """Write the files of this process into the directory of the model. Rank zero also writes
        the settings. `shards`: the directory of the exchanged shards. Raises OSError.
        """
        directory.mkdir(parents=True, exist_ok=True)
        if is_rank_zero():
            if self.adapter is None:
                export.save_settings(self.weights, self.initial_model_dir, directory)
            else:
                adapters.write_config(self.adapter, directory)
        self.weights.write_files(directory, shards)

    def stage_own_files(self) -> None:
        """Write the files of this process, which is not rank zero, into the staging directory.
        Raises WeightError.
        """
        assert self.staged is not None, "taken for publishing"
        self.staged.stage_own_files()

    def write_model(self, directory: Path) -> None:
        """In rank zero, write a directory that a server can load: a Hugging Face model, or an
        adapter. Raises WeightError and OSError.
        """
        if self.staged is None:
            self.write_own_files(directory, directory)
        else:
            self.write_own_files(directory, self.staged.shards)
            self.staged.gather_files(directory)

    def sha256(self) -> str:
        """The hash that the version is announced with."""
        with tempfile.TemporaryDirectory() as directory:
            self.write_model(Path(directory))
            return describe(Path(directory)).sha256

    def put_into_store(self, store: Store) -> ExportResult:
        """Write the version, and hash it, in the store. Raises WeightError."""
        started = time.monotonic()
        exported = 0.0

        def write(directory: Path) -> None:
            nonlocal exported
            self.write_model(directory)
            exported = time.monotonic()

        stored = store.put(self.position.version, write, self.weights.size_bytes)
        return ExportResult(stored, exported - started, time.monotonic() - exported)
