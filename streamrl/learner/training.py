"""Training as a fold over batches: (policy and optimiser, batch) to (policy and optimiser). Batch k is trained at version k and gives version k + 1.

The process announces what comes of it, a replay compares it with what was announced, a fork goes on from it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from levanter.trainer_state import TrainerState

from streamrl.batcher.packing import expand
from streamrl.config import RunFile
from streamrl.errors import ModelError
from streamrl.learner import checkpoints, model
from streamrl.learner.checkpoints import Position
from streamrl.learner.initial import origin
from streamrl.learner.together import first, first_then_others, wait_for_all
from streamrl.learner.update import Updater
from streamrl.records import Batch, Probe, token_dtype
from streamrl.weights import export
from streamrl.weights.manifest import describe
from streamrl.weights.store import Store, Stored, version_name


class Start(NamedTuple):
    """A checkpoint to go on from."""

    directory: Path  # of checkpoints
    position: Position


def checkpoint_directory(run: RunFile, learner: str) -> Path:
    """A learner's own."""
    return run.directory / "checkpoints" / learner


def inherited(run: RunFile) -> Start | None:
    """What a fork begins with: a policy of its parent's, with its optimiser. None for a run that is no fork. Raises ModelError."""
    if run.fork is None:
        return None
    found = checkpoints.latest(run.directory / "start", run.fork.version)
    if found is None or found.version != run.fork.version:
        where = f"version {run.fork.version} of {run.fork.run}, and its checkpoint in {run.directory / 'start'} is gone"
        raise ModelError(f"run {run.run} begins with {where}; fork again, under another name")
    return Start(run.directory / "start", found)


@contextmanager
def training(run: RunFile, start: Start | None = None) -> Generator[Training]:
    """The policy that the run begins with (or that of the checkpoint `start`), ready to be trained while the block lasts. Raises ModelError."""
    directory, updater = first_then_others(lambda: origin(run)), Updater(run.learner, run.batcher.rows)
    with updater.training():
        reference = model.load(directory, run.model.max_seq_len) if run.learner.kl_coefficient > 0 else None
        state = updater.initial_state(model.load(directory, run.model.max_seq_len))
        policy = Training(run, directory, updater, reference, state, Position(0, 0, ""))
        if start := start or inherited(run):
            policy.load(start)
        yield policy


@dataclass
class Training:
    """The policy in training, as it stands after the batches so far."""

    run: RunFile
    origin: Path  # directory of the initial model: tokenizer and settings are exported from it
    updater: Updater
    reference: Any  # the model that the divergence is measured from; None where nobody asks
    state: TrainerState[Any]
    position: Position  # sha256 is empty until the weights have been exported
    vocab_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.vocab_size = min(len(model.load_tokenizer(self.origin)), self.state.model.Vocab.size)  # embeddings may be padded

    @property
    def version(self) -> int:
        return self.position.version

    def step(self, batch: Batch, offset: int) -> dict[str, float]:
        """Train on one batch; `offset` is that of the record behind it. Returns what was measured. Raises ModelError."""
        if batch.number != self.version:
            missing = f"batches are missing before offset {offset}, or the checkpoint is of another run; go on under a new run name"
            raise ModelError(f"batch {batch.number} came at version {self.version}: {missing}")
        model.check_tokens(batch, self.vocab_size)
        self.state, measured = self.updater.step(self.state, self.reference, expand(batch))
        self.position = Position(batch.number + 1, offset, "")
        return measured

    def sha256(self) -> str:
        """What the weights are announced as."""
        with tempfile.TemporaryDirectory() as directory:
            export.save(self.state.model, self.origin, Path(directory))
            self.position = self.position._replace(sha256=describe(Path(directory)).sha256)
        return self.position.sha256

    def write(self, store: Store) -> Stored:
        """Put the weights into the store. Returns their claim check."""
        name = version_name(self.version)
        if first():
            with store.writing(name, export.size_bytes(self.state.model)) as directory:
                export.save(self.state.model, self.origin, directory)
        else:
            export.state_dict(self.state.model)  # the parts that this process has, for the one that writes
        wait_for_all(name)
        stored = store.claim(name)
        self.position = self.position._replace(sha256=stored.sha256)
        return stored

    def load(self, start: Start) -> None:
        """Go on from a checkpoint. Raises ModelError."""
        self.state, self.position = checkpoints.load(start.directory, start.position, self.state), start.position

    def save(self, directory: Path, keep: int) -> None:
        """Write a checkpoint, once the hash of the weights is known. Raises ModelError."""
        assert self.position.sha256, "exported first"
        checkpoints.save(directory, self.state, self.position, keep)

    def probe(self) -> Probe:
        """Tokens drawn by the version's number from the ids of the tokenizer, with this policy's logprobs of them."""
        count = min(self.run.learner.probe_tokens, self.run.model.max_seq_len, self.run.inference.max_model_len - 1)
        tokens = np.random.default_rng(self.version).integers(0, self.vocab_size, count).astype(token_dtype(self.vocab_size))
        return Probe(tokens=tokens, logprobs=self.updater.logprobs(self.state.model, model.single(tokens))[0, :-1])
