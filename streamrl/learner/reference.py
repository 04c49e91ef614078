"""The model that the policy's divergence is measured from: which one it is for a batch, and the one
in memory.

The learner and the workers of the scorer pool have both from here, and the logprobs from
`Updater.scores`: who computes them makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.config.run_file import RunFile
from streamrl.errors import ModelError
from streamrl.learner import model
from streamrl.learner.initial import initial_model_dir

EXTERNAL = -1  # no version of the policy: the model at learner.reference.path


def reference_version(run: RunFile, batch: int) -> int:
    """The policy version that a batch is measured from; OWN for another model. 0 is the one that
    the run began with, a fork's its parent's.

    A function of the number alone, so that nobody has to be told: `every` 20 gives 0 for batches 0
    to 19, 20 for 20 to 39. A fork that follows begins with the version it was made at.
    """
    settings = run.learner.reference
    if settings.path:
        return EXTERNAL
    if not settings.every:
        return 0
    return max(batch - batch % settings.every, run.fork.version if run.fork else 0)


def trainable_vocab_size(run: RunFile, rows: int) -> int:
    """Token ids that can be trained on are below it: the policy has an embedding of them, and so
    has its reference. Raises ModelError.

    A server samples from all `rows` of the policy's embedding, also from those that pad it. This
    number is announced, so that the buffer refuses what the learner would mask.
    """
    settings = run.learner.reference
    if not (run.learner.uses_reference and settings.path):
        return rows
    return min(rows, model.hf_config(Path(settings.path)).vocab_size)


@dataclass
class ReferenceModel:
    """The one in memory, of those that a run has one after another. To be used inside the trainer's
    mesh.
    """

    run: RunFile
    tokenizer_ids: int  # ids that the policy's tokenizer knows are below it
    version: int | None = None
    model: Any = None

    def version_to_load(self, batch: int) -> int | None:
        """The version to be loaded before this batch; None while the one in memory is right."""
        wanted = reference_version(self.run, batch)
        return None if wanted == self.version else wanted

    def load(self, version: int, directory: Path) -> None:
        """Instead of the one before. `directory`: of the version, as it was announced. Raises
        ModelError.
        """
        self.version, self.model = None, None  # so that there are never two in memory
        loaded = model.load(directory, self.run.model.max_seq_len)
        if loaded.Vocab.size < self.tokenizer_ids:
            known = f"knows token ids below {loaded.Vocab.size}, the policy's tokenizer those below {self.tokenizer_ids}"
            raise ModelError(
                f"reference {directory} {known}; learner.reference.path needs a model with the policy's tokenizer"
            )
        self.version, self.model = version, loaded


def static_reference_dir(run: RunFile, version: int) -> Path | None:
    """The directory of a reference that nobody has to wait for; None for a version that has to be
    trained first. Raises ModelError.
    """
    if version == EXTERNAL:
        model.check_directory(Path(run.learner.reference.path))
        return Path(run.learner.reference.path)
    return initial_model_dir(run) if version == 0 else None
