"""PolicyTrainer: the policy and its optimizer, trained batch by batch.

Batch k is trained at version k and gives version k + 1. `open_trainer` loads the model that the run
begins with, or a checkpoint. `step` then trains on one batch:

1. It loads the reference model of this batch, if the loss measures the divergence from one.
2. It masks the sequences that cannot be trained on, and lays the batch out in dense rows.
3. It updates the parameters (`update.py`), or skips the update if the batch is unusable or the
   update would not be finite.

After the step `snapshot` copies the weights for the publisher, `probe` computes the logprobs that
servers are compared with, and `save` writes a checkpoint.

An example: the policy is at version 7, and batch 7 comes. Two of its sequences have token ids that
the model does not have. They are masked, the parameters are updated with the others, and the policy
is at version 8. Batch 7 may be in the log twice: `is_due` is then false the second time. If batch 9
came next, batch 8 would be missing, and `step` would raise InputGone.

The learner's process publishes the versions. A replay compares their hashes with the announced
ones, and a fork starts from one of them.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from levanter.trainer_state import TrainerState

from streamrl.config.run_file import RunFile
from streamrl.learner import adapters, probe
from streamrl.learner.adapter_base import RandomAdapter, base_manifest, random_adapter
from streamrl.learner.adapters import AdapterFormat
from streamrl.learner.files import checkpoints, export
from streamrl.learner.files.checkpoint_copies import CheckpointCopies
from streamrl.learner.files.checkpoints import PendingCheckpoint, TrainingPosition
from streamrl.learner.files.staging import StagedFiles, shards_beside, staging_directory
from streamrl.learner.initial import initial_model_dir
from streamrl.learner.inputs import TrainingInput
from streamrl.learner.loss.masking import mask_untrainable
from streamrl.learner.model import attention, model
from streamrl.learner.model.examples import RlExample, expand, rollout_numbers, to_dense
from streamrl.learner.model.experts import without_foreign_experts
from streamrl.learner.parallel.distributed import (
    barrier,
    is_rank_zero,
    rank_zero_first,
    shared_token,
)
from streamrl.learner.parallel.mesh import make_deterministic
from streamrl.learner.reference import (
    ReferenceModel,
    reference_version,
    static_reference_dir,
    trainable_vocab_size,
)
from streamrl.learner.snapshot import WeightsSnapshot
from streamrl.learner.update import Updater
from streamrl.stream.records import Batch, Probe, Scores
from streamrl.system.errors import CheckpointError, ConfigError, InputGone, TrainingDiverged
from streamrl.weights.files import describe
from streamrl.weights.store import version_name

logger = logging.getLogger(__name__)

ADAPTER_SEED = 0  # of the matrices that adapters begin with
MAX_SKIPPED_STEPS = 10  # in a row in which nothing could be trained on; one more ends the run


class ResumePoint(NamedTuple):
    """A checkpoint to resume from."""

    directory: Path  # The directory with the checkpoints.
    position: TrainingPosition


def checkpoint_directory(run: RunFile, learner: str) -> Path:
    """The directory of a learner's checkpoints."""
    return run.directory / "checkpoints" / learner


def copies_of(run: RunFile, learner: str) -> CheckpointCopies | None:
    """The copies of a learner's checkpoints, or None if the run file asks for none."""
    root = run.learner.checkpoint_copies.rstrip("/")
    return CheckpointCopies(f"{root}/{run.run}/checkpoints/{learner}") if root else None


def fork_checkpoint(run: RunFile) -> ResumePoint | None:
    """The checkpoint that a fork begins with, made from its parent, or None for a run that is not a
    fork. Raises CheckpointError.
    """
    if run.fork is None:
        return None
    checkpoint = checkpoints.latest(run.directory / "start", run.fork.version)
    if checkpoint is None or checkpoint.version != run.fork.version:
        where = (
            f"version {run.fork.version} of {run.fork.run}, and its checkpoint in"
            f" {run.directory / 'start'} is gone"
        )
        raise CheckpointError(f"run {run.run} begins with {where}; fork again, under another name")
    return ResumePoint(run.directory / "start", checkpoint)


@contextmanager
def open_trainer(
    run: RunFile, start: ResumePoint | None = None, temporary_dir: Path | None = None
) -> Generator[PolicyTrainer]:
    """The policy that the run begins with, or that of the checkpoint `start`. It can be trained
    while the block lasts.

    `temporary_dir`: the directory for weights that are written and read at once. All processes of
    a learner have to see it. None, for one process alone: this machine's.

    Raises ModelError, and CheckpointError for a checkpoint that cannot be read.
    """
    if run.learner.deterministic:
        make_deterministic()
    directory = rank_zero_first(lambda: initial_model_dir(run))
    updater = Updater(run.learner, run.batcher.rows, run.batcher.max_seq_len)
    lora = run.learner.lora
    with updater.training():
        lengths = run.batcher.all_row_lengths
        initial = model.load(directory, run.model.max_seq_len, run.learner, row_lengths=lengths)
        if lora is not None:
            initial = adapters.attach(initial, lora, ADAPTER_SEED)
        policy = PolicyTrainer(
            run=run,
            initial_model_dir=directory,
            updater=updater,
            state=updater.initial_state(initial),
            position=TrainingPosition(0, 0, ""),
            temporary_dir=temporary_dir or Path(tempfile.gettempdir()),
            adapter=AdapterFormat(lora, base_manifest(directory)) if lora else None,
        )
        start = start or fork_checkpoint(run)
        if start:
            policy.load(start)
        policy.load_reference(start)
        yield policy


@dataclass
class PolicyTrainer:
    """The policy in training: its state after the batches so far."""

    run: RunFile
    initial_model_dir: Path  # tokenizer and settings are exported from it
    updater: Updater
    state: TrainerState[Any]
    position: TrainingPosition  # sha256 is empty until the weights have been exported
    temporary_dir: Path  # all processes see it
    # How versions are written if adapters are trained. None: the whole model is trained.
    adapter: AdapterFormat | None = None
    vocab_size: int = field(init=False)  # token ids that can be trained on are below it
    _text: np.ndarray = field(init=False)  # tokens of the probe before the first batch
    # ids that the tokenizer knows are below it; the embedding may be padded
    tokenizer_ids: int = field(init=False)
    skipped: bool = False  # nothing was trained in the last step
    _skipped_in_a_row: int = 0
    _exports: int = 0  # of the weights to a temporary directory, so far
    _trained_tokens: np.ndarray | None = None  # some of the last batch, for the probe
    # The model that the divergence is measured from, if this process loads one.
    reference: ReferenceModel | None = field(init=False)
    # The divergence is measured from the model without its adapters.
    _base_is_reference: bool = field(init=False)

    def __post_init__(self) -> None:
        tokenizer = model.load_tokenizer(self.initial_model_dir)
        self.tokenizer_ids = min(len(tokenizer), self.state.model.Vocab.size)
        self._text = probe.text_tokens(tokenizer, self._probe_count, self.tokenizer_ids)
        self.vocab_size = trainable_vocab_size(self.run, self.state.model.Vocab.size)
        self._base_is_reference = False
        self.reference = None
        settings = self.run.learner.reference
        if settings is not None and settings.by == "learner":
            # If adapters are trained, the model without them is the initial one, and is in memory.
            self._base_is_reference = self.adapter is not None and not settings.path
            if not self._base_is_reference:
                self.reference = ReferenceModel(self.run, self.tokenizer_ids)

    @property
    def version(self) -> int:
        return self.position.version

    @property
    def _weights_dtype(self) -> np.dtype[Any]:
        """The data type that versions are written in. Checkpoints are in float32."""
        return np.dtype(self.run.inference.weights_dtype)

    def is_due(self, batch: Batch) -> bool:
        """Whether the batch has not been trained on. It is false for a batch that is in the log a
        second time.
        """
        if batch.number < self.version:
            logger.warning(
                "batch %d is skipped: it was trained on before version %d",
                batch.number,
                self.version,
            )
        return batch.number >= self.version

    def step(self, taken: TrainingInput) -> dict[str, float]:
        """The measurements of training on one batch, by name. The policy is at the next version
        then.

        Sequences that cannot be trained on are masked. If the whole batch cannot be trained on, or
        the update is not finite, the step is skipped: the next version has the weights of this one.
        Raises TrainingDiverged after more than MAX_SKIPPED_STEPS skipped steps in a row, and
        InputGone if batches are missing before this one.
        """
        batch = taken.batch
        if batch.number != self.version:
            missing = (
                f"batches are missing before offset {taken.offset}, or the checkpoint is of another"
                " run; continue under a new run name"
            )
            raise InputGone(f"batch {batch.number} came at version {self.version}: {missing}")
        self.load_reference()
        try:
            batch, masked = mask_untrainable(batch, self.vocab_size)
            batch = without_foreign_experts(batch, self.state.model)
            self._trained_tokens = probe.batch_tokens(
                batch, self.version + 1, self._probe_count, self.tokenizer_ids
            )
            example = (
                expand_with_scores(self.run, batch, taken.scores, masked)
                if self.run.learner.needs_scores
                else expand(batch, masked)
            )
        except ValueError as error:
            logger.warning("nothing is trained on batch %d: %s", batch.number, error)
            measured = {"skipped": 1.0}
        else:
            if slow := attention.slow_rows(self.state.model, example.segment_ids):
                logger.warning(
                    "batch %d: %d of its rows have more than %d rollouts, so their attention is"
                    " computed by the slower reference; lower batcher.max_seq_len",
                    batch.number,
                    slow,
                    attention.CUDNN_SEGMENTS - 1,
                )
            self.state, measured = self.updater.step(
                self.state, self._reference_model(), example, rollout_numbers(batch)
            )
            measured["masked_sequences"] = float(masked.sum())
        self.skipped = bool(measured["skipped"])
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if self.skipped else 0
        if self._skipped_in_a_row > MAX_SKIPPED_STEPS:
            hint = "lower learner.learning_rate or look at the batches, then continue with --resume"
            steps = f"in {self._skipped_in_a_row} steps in a row, up to batch {batch.number}"
            raise TrainingDiverged(f"nothing could be trained on {steps}; {hint}")
        self.position = TrainingPosition(
            version=batch.number + 1,
            offset=taken.offset,
            sha256="",
            scores=taken.scores_offset,
        )
        return measured

    def _reference_model(self) -> Any:
        """The model that the divergence of the next batch is measured from. None if there is none,
        or if the scorer pool has it.
        """
        if self._base_is_reference:
            return adapters.detach(self.state.model)
        if self.reference is None:
            return None
        return self.reference.model

    def load_reference(self, start: ResumePoint | None = None) -> None:
        """Load the reference model of the next batch, unless it is in memory.

        It is a model on disk, the current policy, or an earlier version, which is in the checkpoint
        `start`. Raises ConfigError if that checkpoint does not have it.
        """
        if self.reference is None:
            return
        wanted = self.reference.version_to_load(self.version)
        if wanted is None:
            return
        directory = static_reference_dir(self.run, wanted)
        if directory is not None:
            self.reference.load(wanted, directory)
        elif wanted == self.version:
            # It is exported and loaded, as a scorer does: in memory its head may be tied.
            with self._exported() as directory:
                self.reference.load(wanted, directory)
        else:
            self.reference.load(wanted, self._checkpointed_reference(start, wanted))

    def _checkpointed_reference(self, start: ResumePoint | None, wanted: int) -> Path:
        """The directory of reference version `wanted` in the checkpoint `start`. Raises ConfigError
        if the checkpoint does not have it.
        """
        if start:
            checkpoint = checkpoints.path_of(start.directory, self.version)
            directory = checkpoint / reference_dir_name(wanted)
            if directory.is_dir():
                return directory
        raise ConfigError(
            f"checkpoint {self.version} holds no reference of version {wanted}: it was made under"
            " another learner.kl.reference; set that, or begin at a version that"
            " learner.kl.reference.every divides"
        )

    @contextmanager
    def _exported(self) -> Iterator[Path]:
        """A directory with the current weights, which is deleted after the block. All processes of
        a learner write it together, and all may read it: they share the run's directory. Rank zero
        may still delete one such directory when the next is written, so their names differ.
        """
        snapshot = self.snapshot()
        self._exports += 1
        name = f"{checkpoints.TEMPORARY}exported-{shared_token()}-{self._exports}"
        directory = self.temporary_dir / name
        shards = shards_beside(directory)
        try:
            snapshot.weights.write_shards(shards)
            barrier("shards")
            snapshot.write_own_files(directory, shards)
            barrier("exported")
            yield directory
            barrier("read")
        finally:
            if is_rank_zero():
                shutil.rmtree(directory, ignore_errors=True)
                shutil.rmtree(shards, ignore_errors=True)

    def snapshot(self, checkpoint_dir: Path | None = None) -> WeightsSnapshot:
        """A copy of the current weights, of which each process gets its shards. All processes of a
        learner call this together.

        `checkpoint_dir`: the directory of the learner's checkpoints, if the version is to be
        published. The staging directory of its files is in it.
        """
        if self.adapter is not None:
            weights = adapters.local_weights(self.state.model)
        else:
            head = export.has_head(self.initial_model_dir)
            weights = export.local_weights(self.state.model, head, self._weights_dtype)
        staged = None
        if checkpoint_dir is not None:
            directory = staging_directory(checkpoint_dir, self.version)
            staged = StagedFiles(directory, weights)
        return WeightsSnapshot(
            position=self.position,
            initial_model_dir=self.initial_model_dir,
            weights=weights,
            vocab_size=self.vocab_size,
            skipped=self.skipped,
            adapter=self.adapter,
            staged=staged,
        )

    def sha256(self) -> str:
        """The hash that the current weights are announced with. All processes of a learner call
        this together.
        """
        with self._exported() as directory:
            self.position = self.position._replace(sha256=describe(directory).sha256)
        return self.position.sha256

    def load(self, start: ResumePoint) -> None:
        """Resume from a checkpoint. Raises CheckpointError."""
        self.state = checkpoints.load(start.directory, start.position, self.state)
        self.position = start.position

    def save(self, directory: Path, keep: int) -> None:
        """Write a checkpoint, and keep the newest `keep`. `sha256` is called before. Raises
        CheckpointError.
        """
        assert self.position.sha256, "exported first"
        checkpoints.save(directory, self.state, self.position, keep, self._reference_to_save())

    def begin_checkpoint(self, directory: Path) -> PendingCheckpoint:
        """A checkpoint that is being written, in all its files but the position, without which it
        does not count. Training may continue at once. Raises CheckpointError.
        """
        return checkpoints.begin(directory, self.state, self.version, self._reference_to_save())

    def _reference_to_save(self) -> Callable[[Path], None]:
        """A function that writes the reference of the next batch into a checkpoint, in all
        processes together. It writes nothing unless the reference is an earlier version, whose
        weights may be gone from the store at a restart.
        """
        version = reference_version(self.run, self.version)
        if self.reference is None or not 0 < version < self.version:
            return checkpoints.write_nothing
        assert self.reference.version == version, "an earlier batch has loaded it"
        origin = self.initial_model_dir
        head = export.has_head(origin)
        weights = export.local_weights(self.reference.model, head, self._weights_dtype)

        def write(checkpoint: Path) -> None:
            directory = checkpoint / reference_dir_name(version)
            if is_rank_zero():
                export.save_settings(weights, origin, directory)
            StagedFiles(directory, weights).write_all_files()

        return write

    def random_adapter(self) -> RandomAdapter:
        """The adapter that servers are checked with before they serve any of this policy. All
        processes of a learner call this together.
        """
        assert self.adapter is not None, "adapters are trained"
        return random_adapter(
            adapters.detach(self.state.model),
            self.adapter.settings,
            ADAPTER_SEED,
            lambda changed: self._probe_of(changed, self._text),
            self.run.inference.probe_tolerance,
        )

    def probe(self) -> Probe:
        """Tokens and this policy's logprobs of them, which a server's logprobs are compared with.
        They are tokens of the last batch, drawn with the version as the seed, or those of a text
        before the first batch.
        """
        tokens = self._trained_tokens
        if tokens is None or len(tokens) < 2:
            tokens = self._text
        return self._probe_of(self.state.model, tokens)

    @property
    def _probe_count(self) -> int:
        return min(
            self.run.learner.probe_tokens,
            self.run.model.max_seq_len,
            self.run.inference.max_model_len - 1,
        )

    def _probe_of(self, model: Any, tokens: np.ndarray) -> Probe:
        """The logprobs of these tokens, computed in a row of the length that is trained on."""
        row = probe.training_row(tokens, self.run.batcher.max_seq_len)
        logprobs = probe.last_copy(self.updater.logprobs(model, row), len(tokens))
        return Probe(tokens=tokens, logprobs=logprobs)


def reference_dir_name(version: int) -> str:
    """Directory of the reference model inside a checkpoint."""
    return f"reference-{version_name(version)}"


def expand_with_scores(
    run: RunFile, batch: Batch, scores: Scores | None, masked: np.ndarray | None = None
) -> RlExample:
    """The dense arrays of a batch, with the logprobs that the scorer pool computed. `masked`: (n,)
    bool, the sequences that are not trained on. Raises ValueError if the scores do not fit the
    batch.
    """
    assert scores is not None, "a batch is read together with its scores"
    example = expand(batch, masked)
    if scores.teacher_logprobs is not None:
        teacher = to_dense(batch, scores.teacher_logprobs) * example.loss_mask
        example = example._replace(teacher_logprobs=teacher)
    elif batch.teacher_kl_weights is not None:
        logger.warning(
            "batch %d was scored without a teacher: nothing is distilled from it", batch.number
        )
    if not run.learner.pool_scores_reference:
        return example
    wanted = reference_version(run, batch.number)
    if scores.reference != wanted:  # learner.kl.reference has been changed since.
        logger.warning(
            "batch %d was scored under version %d, and is measured from it; wanted is now %d",
            batch.number,
            scores.reference,
            wanted,
        )
    return example._replace(reference_logprobs=to_dense(batch, scores.logprobs))
