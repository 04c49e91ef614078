"""Settings of the buffer and the batcher that cannot work: sizes, rows, groups, curriculum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from streamrl.config.choices import NORMALIZED_ADVANTAGES, RELATIVE_ADVANTAGES
from streamrl.config.presets import ROW_BLOCK
from streamrl.config.sections.batches import Learnability, Stages
from streamrl.config.topology import LARGE_RECORD_BYTES, RECORD_BYTES
from streamrl.system.text import nearest_or_all

if TYPE_CHECKING:
    from streamrl.config.run_file import RunFile
    from streamrl.config.sections.batches import Buffer, Stage

TOKEN_BYTES = 6  # of an id and its logprob


def curriculum_problems(run: RunFile) -> Iterator[str]:
    chosen = run.batcher.curriculum
    where = "batcher.curriculum"
    fixed = [name for name, env in run.envs.items() if env.fraction]
    if chosen and fixed:
        yield f"envs.{fixed[0]}.fraction: {where} sets the fractions; leave it out"
    if isinstance(chosen, Learnability) and chosen.least * len(run.envs) > 1:
        yield f"{where}.least {chosen.least} of each of {len(run.envs)} envs is more than a batch"
    if isinstance(chosen, Stages):
        for index, stage in enumerate(chosen.stages):
            for problem in _stage_problems(run, stage, index == len(chosen.stages) - 1):
                yield f"{where}.stages.{index}{problem}"
        ends = [stage.until_batch for stage in chosen.stages if stage.until_batch]
        if ends != sorted(set(ends)):
            yield f"{where}.stages: until_batch has to grow from stage to stage, not {ends}"


def _stage_problems(run: RunFile, stage: Stage, last: bool) -> Iterator[str]:
    total = sum(stage.fractions.values())
    for name in stage.fractions:
        if name not in run.envs:
            yield f".fractions: no env {name!r}; {nearest_or_all(name, run.envs)}"
    if not 0 < total <= 1 + 1e-9:
        yield f".fractions add up to {total:.4g}; above 0 and at most 1 is possible"
    if bool(stage.until_batch or stage.until) == last:
        yield (
            ": nothing follows the last stage; leave its end out"
            if last
            else ": give until_batch or until, where the next one begins"
        )
    target = stage.until
    if target and not (
        stage.fractions.get(target.env) or (target.env in run.envs and total < 1 - 1e-9)
    ):
        yield (
            f".until: {target.env!r} has no share of the batches of this stage, so its reward would"
            " not change"
        )


def size_problems(run: RunFile) -> Iterator[str]:
    batcher = run.batcher
    budget = batcher.total_token_budget
    yield from _group_problems(run, "buffer", run.buffer)
    for name, env in run.envs.items():
        if env.buffer.given:
            compares = bool(env.loss.policy_gradient)
            yield from _group_problems(run, f"envs.{name}.buffer", run.buffer_of(name), compares)
    compared = {
        run.buffer_of(name).advantage in NORMALIZED_ADVANTAGES
        for name, env in run.envs.items()
        if env.loss.policy_gradient
    }
    if len(compared) > 1 and not batcher.advantage:
        yield (
            "batcher.advantage: of the envs' advantages some need normalize and some none"
            f" ({', '.join(NORMALIZED_ADVANTAGES)} do); choose one kind"
        )
    if batcher.rows * batcher.max_seq_len < budget:
        yield (
            f"batcher.row_count {batcher.rows} x max_seq_len {batcher.max_seq_len} is less than"
            f" total_token_budget {budget}"
        )
    yield from _record_problems(run)
    mesh = run.learner.mesh
    by_rows = mesh.data * mesh.replica * mesh.expert
    if mesh.data > 0 and batcher.processes % by_rows:
        yield (
            f"batcher.processes {batcher.processes}: learner.mesh divides the rows among"
            f" {by_rows} devices (data times replica times expert); give that number"
        )
    yield from _row_problems(run)
    if batcher.rows % batcher.processes:
        yield (
            f"batcher.row_count {batcher.rows} cannot be divided among batcher.processes"
            f" {batcher.processes}; give a multiple of it"
        )
    if batcher.balance == "flops" and not run.model.hidden_size:
        yield (
            f"batcher.balance flops needs model.hidden: hidden_size in {run.model.path}/config.json"
        )
    if run.model.max_seq_len > batcher.max_seq_len:
        yield (
            f"model.max_seq_len {run.model.max_seq_len} is larger than batcher.max_seq_len"
            f" {batcher.max_seq_len}: rollouts could not be packed"
        )


def _record_problems(run: RunFile) -> Iterator[str]:
    """Batches and groups that no record could hold, whatever else they have than the ids and the
    logprobs of their tokens.
    """
    most = LARGE_RECORD_BYTES // TOKEN_BYTES
    if run.batcher.total_token_budget > most:
        yield (
            f"batcher.total_token_budget {run.batcher.total_token_budget}: a record holds a batch"
            f" of at most {most} tokens; lower it"
        )
    most = RECORD_BYTES // TOKEN_BYTES
    for name in run.envs:
        size = run.buffer_of(name).group_size
        if size * run.model.max_seq_len > most:
            yield (
                f"envs.{name}: {size} rollouts (group_size) of {run.model.max_seq_len} tokens"
                f" (model.max_seq_len) are more than the {most} tokens of a group that a record"
                " holds; lower one of the two"
            )


def _row_problems(run: RunFile) -> Iterator[str]:
    """Rows that the kernel of attention refuses, or that devices cannot divide."""
    batcher = run.batcher
    context = run.learner.mesh.context
    chosen = run.learner.attention
    for length in batcher.row_lengths:
        if length >= batcher.max_seq_len:
            yield (
                f"batcher.row_lengths: {length} is not below max_seq_len {batcher.max_seq_len},"
                " which the longest rows have; leave it out"
            )
    if len(set(batcher.row_lengths)) < len(batcher.row_lengths):
        yield f"batcher.row_lengths {batcher.row_lengths}: each length once"
    for length in (batcher.max_seq_len, *batcher.row_lengths):
        where = "max_seq_len" if length == batcher.max_seq_len else "row_lengths:"
        if length % context:
            yield (
                f"batcher.{where} {length} cannot be divided among learner.mesh.context"
                f" {context} devices; give a multiple of it"
            )
        if length > ROW_BLOCK and length % ROW_BLOCK:
            yield (
                f"batcher.{where} {length}: attention is computed in blocks of {ROW_BLOCK}"
                f" tokens; give a multiple of it, such as {-(-length // ROW_BLOCK) * ROW_BLOCK}"
            )
    if chosen in ("cudnn", "pallas") and context > 1:
        yield (
            f"learner.attention {chosen} needs whole rows, and learner.mesh.context divides them;"
            " set context: 1, or attention: reference"
        )


def _group_problems(
    run: RunFile, where: str, buffer: Buffer, compares: bool = True
) -> Iterator[str]:
    """Problems of the buffer's rules, those for all envs or for one, with the batcher's sizes.

    `compares`: advantages train, so the rollouts of a group are compared.
    """
    batcher = run.batcher
    budget = batcher.total_token_budget
    if batcher.lookahead > buffer.max_age:
        yield (
            f"batcher.lookahead is {batcher.lookahead} but {where}.max_age is {buffer.max_age}:"
            " need 0 <= lookahead <= max_age"
        )
    if buffer.min_group_size > buffer.group_size:
        yield (
            f"{where}.min_group_size {buffer.min_group_size} is larger than {where}.group_size"
            f" {buffer.group_size}"
        )
    if compares and buffer.min_group_size == 1 and buffer.advantage in RELATIVE_ADVANTAGES:
        alone = (
            f"{buffer.advantage} compares the rollouts of a group, so one alone has advantage 0 and"
            " only fills the batch"
        )
        yield (
            f"{where}.min_group_size is 1, and {alone}; set it to 2 or more, or advantage:"
            " reinforce++"
        )
    group = f"{buffer.group_size} rollouts of model.max_seq_len {run.model.max_seq_len} tokens"
    if run.buffer.shards > run.topics.partitions:
        yield (
            f"buffer.shards {run.buffer.shards} is larger than topics.partitions"
            f" {run.topics.partitions}: a shard would have nothing to read"
        )
    window = buffer.max_window_tokens // buffer.shards
    if window < buffer.group_size * run.model.max_seq_len:
        yield (
            f"buffer.max_window_tokens {buffer.max_window_tokens} does not hold a group of {group}:"
            " it would never be complete"
        )
    if budget < buffer.min_group_size * 2:
        yield (
            f"batcher.total_token_budget {budget} holds no group of {buffer.min_group_size}"
            " rollouts"
        )
    half_row = batcher.max_seq_len // 2 + 1  # Two sequences of this length do not share a row.
    large = (
        buffer.group_size > batcher.rows
        and buffer.group_size * half_row <= budget <= batcher.rows * batcher.max_seq_len
    )
    if large and half_row <= run.model.max_seq_len <= batcher.max_seq_len:
        fits = (
            f"{buffer.group_size} rollouts of {half_row} tokens need a row of {batcher.max_seq_len}"
            f" each, and there are {batcher.rows}"
        )
        yield (
            f"batcher.row_count: {fits}: such groups could not be trained on; set it to"
            f" {buffer.group_size}"
        )
    # With fewer tokens a process might get no rollout.
    longest = (batcher.processes + buffer.group_size - 1) * run.model.max_seq_len
    if batcher.processes > 1 and budget < longest:
        one_each = (
            f"{batcher.processes} processes and groups of {buffer.group_size} rollouts of"
            f" {run.model.max_seq_len} tokens need {longest}"
        )
        yield (
            f"batcher.total_token_budget {budget} does not give every process a rollout for"
            f" certain: {one_each}"
        )
