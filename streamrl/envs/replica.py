"""One replica of an env: which problems it launches, and what it publishes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import structs

from streamrl.config import topology
from streamrl.config.sections.envs import Env
from streamrl.envs.api import Problem
from streamrl.envs.difficulty_filter import ProblemStats
from streamrl.envs.engine.problems import ProblemError, make_problem
from streamrl.envs.engine.runner import RolloutRunner
from streamrl.envs.engine.transcript import Task, failed_group
from streamrl.envs.flow_control import OutstandingLimit
from streamrl.envs.held_out import problem_fingerprint
from streamrl.envs.open_sessions import ResumeOffsets
from streamrl.envs.problem_cursor import ProblemCursor
from streamrl.inference.clients.client import SamplingFailed
from streamrl.stream.log.codec import to_message
from streamrl.stream.log.protocol import Message, Output
from streamrl.stream.records import Demand, Rollout, Visit
from streamrl.system.errors import ConfigError

# A rate is kept on average: launches that were due within this time are made up for.
BURST_S = 0.1
# The pause before the next launch, for each group that failed in a row.
PAUSE_S = 0.1
MAX_PAUSE_S = 1.0
# After so many held-out problems in a row the env is taken to have no others.
HELD_OUT_IN_A_ROW = 10_000


class RolloutGroup(NamedTuple):
    """The rollouts of one problem, ready to be published."""

    number: int
    rollouts: list[Rollout]

    @property
    def tokens(self) -> float:
        """The tokens of the group had none of its rollouts failed, estimated; 0 if all have."""
        sizes = [rollout.total_tokens for rollout in self.rollouts if not rollout.failure]
        return len(self.rollouts) * sum(sizes) / len(sizes) if sizes else 0.0


@dataclass(kw_only=True)
class Replica:
    """One producer of an env. `launch` begins groups, and `take_finished` and `outputs` give what
    is to be published.
    """

    name: str  # of the env in the run
    journal: str  # the topic of its progress
    settings: Env
    runner: RolloutRunner
    group_size: int
    cursor: ProblemCursor
    limit: OutstandingLimit
    stats: ProblemStats | None = None  # if problems are filtered by pass rate
    held_out: frozenset[bytes] = frozenset()  # fingerprints of problems that are not for training
    resume_offsets: ResumeOffsets | None = None  # if model calls are recorded
    version: int = 0  # the newest policy version that a server had
    filtered_problems: int = 0  # left out by pass rate since this process began
    running: set[asyncio.Task[RolloutGroup]] = field(
        default_factory=set[asyncio.Task[RolloutGroup]]
    )
    next_launch_s: float = 0.0
    failed_in_a_row: int = 0  # groups
    held_out_in_a_row: int = 0  # problems

    @property
    def producer(self) -> str:
        return self.limit.producer

    @property
    def source(self) -> str:
        """The source of its metrics, in whatever process it is."""
        return f"env-{self.producer}"

    def on_demand(self, demand: Demand) -> None:
        self.limit.on_demand(demand, len(self.cursor.progress.open_problems))

    def on_visit(self, visit: Visit) -> None:
        if self.stats:
            self.stats.on_visit(visit)

    def resume_open(self) -> None:
        """Begin the problems that an earlier process left open, without those that have been held
        out since.
        """
        for number in self.cursor.progress.open_problems:
            if self.is_held_out(number):
                self.cursor.skip(number)
                self.limit.launched -= 1
            else:
                self._begin(number)

    def launch(self, now_s: float) -> None:
        """Begin as many groups as demand, concurrency and rate allow."""
        settings = self.settings
        while (
            len(self.running) < settings.max_groups_in_flight
            and now_s >= self.next_launch_s
            and self.limit.allows()
        ):
            self.limit.launched += 1
            self._begin(self.cursor.next(self.is_skipped))
            if settings.max_groups_per_s:
                due_s = self.next_launch_s + 1 / settings.max_groups_per_s
                self.next_launch_s = max(due_s, now_s - BURST_S)

    def is_skipped(self, number: int) -> bool:
        """Whether the problem is held out, or filtered by pass rate. Raises ConfigError if there
        seem to be no other problems.
        """
        if not self.is_held_out(number):
            self.held_out_in_a_row = 0
            return self._is_filtered(number)
        self.held_out_in_a_row += 1
        if self.held_out_in_a_row >= HELD_OUT_IN_A_ROW:
            raise ConfigError(
                f"envs.{self.name}: {HELD_OUT_IN_A_ROW:,} problems in a row are kept for "
                "evaluation; lower `problems` in eval.envs"
            )
        return True

    def is_held_out(self, number: int) -> bool:
        """Whether the problem is kept for evaluation."""
        if not self.held_out:
            return False
        try:
            return problem_fingerprint(make_problem(self.runner.env, number)) in self.held_out
        except ProblemError:
            return False  # it is published as failed

    def take_finished(self, now_s: float) -> list[RolloutGroup]:
        """The groups that have finished since the last call. An unexpected error in one is raised,
        and ends the process.
        """
        done = [task for task in self.running if task.done()]
        self.running.difference_update(done)
        groups = [task.result() for task in done]
        for group in groups:
            if group.tokens:
                self.limit.record_group(group.tokens)
                self.failed_in_a_row = 0
            else:
                self.failed_in_a_row += 1
        if groups and self.failed_in_a_row:
            pause_s = min(self.failed_in_a_row * PAUSE_S, MAX_PAUSE_S)
            self.next_launch_s = max(self.next_launch_s, now_s + pause_s)
        return groups

    @property
    def has_records(self) -> bool:
        """Are there model calls to be recorded?"""
        recorder = self.runner.recorder
        return recorder is not None and recorder.is_waiting

    def outputs(self, groups: Sequence[RolloutGroup]) -> list[Message]:
        """One transaction: what is recorded of sessions, the rollouts, the visits of their
        problems, and the progress.
        """
        recorded = self._take_records(groups)
        outputs: list[Output] = []
        for group in groups:
            for rollout in group.rollouts:
                record = rollout
                if self.limit.epoch:
                    record = structs.replace(rollout, epoch=self.limit.epoch)
                outputs.append(Output(topology.rollouts(self.name), record.group_id, record))
        if self.stats:
            for group in groups:
                visit = self.stats.visit_by(group.number, group.rollouts)
                if visit:
                    key = self.stats.key(visit)
                    outputs.append(Output(topology.visits(self.name), key, visit))
        progress = structs.replace(
            self.cursor.complete([group.number for group in groups]),
            epoch=self.limit.epoch,
            forgotten_groups=self.limit.forgotten,
        )
        if self.resume_offsets is not None:
            progress = structs.replace(progress, turns_from=self.resume_offsets.by_partition())
        outputs.append(Output(self.journal, self.producer, progress))
        return [*recorded, *(to_message(output) for output in outputs)]

    def on_commit(self) -> None:
        """The outputs are in the log."""
        if self.runner.recorder is not None:
            self.runner.recorder.on_commit()

    def _take_records(self, groups: Sequence[RolloutGroup]) -> list[Message]:
        """What is to be written to turns.<env>; these groups have ended."""
        recorder = self.runner.recorder
        if recorder is None:
            return []
        for group in groups:
            for rollout in group.rollouts:
                truncation = str(rollout.metadata.get("truncation", ""))
                recorder.end(rollout.rollout_uid, rollout.failure, truncation)
        return recorder.drain()

    async def close(self) -> None:
        """Cancel what is running, and close the env."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        await self.runner.close()

    def _is_filtered(self, number: int) -> bool:
        filtered = self.stats is not None and self.stats.is_filtered(number)
        self.filtered_problems += filtered
        return filtered

    def _begin(self, number: int) -> None:
        self.running.add(asyncio.create_task(self._generate(number)))

    async def _generate(self, number: int) -> RolloutGroup:
        """The rollouts of one problem. If there are none, they are published as failed."""
        task = Task(self.name, number, self.producer, Problem([]))
        try:
            task = task._replace(problem=make_problem(self.runner.env, number))
            rollouts = await self.runner.run_group(task, self.group_size)
        except (ProblemError, SamplingFailed) as error:
            rollouts = failed_group(task, self.group_size, str(error), self.version)
        return RolloutGroup(number, rollouts)
