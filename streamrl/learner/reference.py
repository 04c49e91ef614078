"""The reference model, from which the policy's divergence is measured: which version it is for a
batch, and the one in memory.

The learner and the scorers share this code and compute logprobs by `Updater.scores`, so it makes no
difference who computes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.config.run_file import RunFile
from streamrl.learner.initial import initial_model_dir
from streamrl.learner.model import model
from streamrl.system import hub
from streamrl.system.errors import ModelError

# Settings that name a model.
REFERENCE = "learner.kl.reference.path"
TEACHER = "learner.teacher"
EXTERNAL = -1  # The reference is no version of the policy but the model at REFERENCE.
NO_REFERENCE = -2  # The pool is asked for a teacher's logprobs alone.


def reference_version(run: RunFile, batch: int) -> int:
    """The policy version that is the reference of a batch, or EXTERNAL if the reference is another
    model. Version 0 is the model that the run began with; for a fork, that its parent began with.

    It depends only on the batch's number, so it is never announced. With `every` 20, it is 0 for
    batches 0 to 19 and 20 for batches 20 to 39. A fork with `every` begins with the version that it
    was made at.
    """
    settings = run.learner.reference
    if settings and settings.path:
        return EXTERNAL
    if not settings or not settings.every:
        return 0
    return max(batch - batch % settings.every, run.fork.version if run.fork else 0)


def trainable_vocab_size(run: RunFile, rows: int) -> int:
    """Token ids below this can be trained on: the policy, its reference and its teacher have an
    embedding of them. Raises ModelError.

    A server samples from all `rows` of the policy's embedding, including padding. This number is
    announced, so that the buffer can refuse what the learner would mask.
    """
    learner = run.learner
    others: dict[str, str] = {}
    if learner.teacher:
        others[TEACHER] = learner.teacher
    if learner.reference:
        others[REFERENCE] = learner.reference.path
    known: list[int] = []
    for setting, path in others.items():
        if path:
            known.append(model.hf_config(hub.model_directory(path, setting)).vocab_size)
    return min(rows, *known) if known else rows


@dataclass
class ReferenceModel:
    """The reference that is in memory. It must be used inside the trainer's mesh."""

    run: RunFile
    tokenizer_ids: int  # ids that the policy's tokenizer knows are below it
    setting: str = REFERENCE  # that names a model other than a version
    version: int | None = None
    model: Any = None

    @property
    def role(self) -> str:
        """What the model is to the learner: the reference or the teacher."""
        return self.setting.removesuffix(".path").rpartition(".")[2]

    def version_to_load(self, batch: int) -> int | None:
        """The version to load before this batch, or None if the right one is in memory."""
        wanted = reference_version(self.run, batch)
        return None if wanted == self.version else wanted

    def load(self, version: int, directory: Path) -> None:
        """Replace the reference by the model in `directory`, which is that of an announced version.
        Raises ModelError.
        """
        # so that there are never two in memory
        self.version = None
        self.model = None
        loaded = model.load(
            directory,
            self.run.model.max_seq_len,
            self.run.learner,
            frozen=True,
            row_lengths=self.run.batcher.all_row_lengths,
        )
        if loaded.Vocab.size < self.tokenizer_ids:
            known = (
                f"knows token ids below {loaded.Vocab.size}, the policy's tokenizer those below"
                f" {self.tokenizer_ids}"
            )
            raise ModelError(
                f"{self.role} {directory} {known}; {self.setting} needs a model with the policy's"
                " tokenizer"
            )
        self.version = version
        self.model = loaded


def static_reference_dir(run: RunFile, version: int) -> Path | None:
    """The directory of a reference that exists from the start, or None for a version that has to be
    trained first. Raises ModelError and HubError.
    """
    if version == EXTERNAL:
        assert run.learner.reference, "it has a path"
        directory = hub.model_directory(run.learner.reference.path, REFERENCE)
        model.check_directory(directory)
        return directory
    return initial_model_dir(run) if version == 0 else None
