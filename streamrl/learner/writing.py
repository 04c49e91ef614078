"""Of the JAX processes of a learner, only rank zero writes to the log."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

from streamrl.config import topology
from streamrl.learner.parallel import distributed
from streamrl.learner.publisher import VersionPublisher
from streamrl.learner.trainer import PolicyTrainer
from streamrl.stream.log.protocol import Log
from streamrl.stream.log.retrying import RetryingWriter
from streamrl.stream.processor.part import OpenPart, open_part
from streamrl.stream.records import PolicyVersion


def open_writing_part(
    log: Log, identity: str, stop: threading.Event
) -> AbstractContextManager[OpenPart[RetryingWriter] | None]:
    """The learner's part in the one of its processes that writes; None in the others.

    A commit that fails because the broker is away is tried again, because a version may have taken
    hours of training.
    """
    if not distributed.is_rank_zero():
        return nullcontext()
    writer = RetryingWriter(log, identity, topology.POLICY_VERSIONS, stop=stop)
    return open_part(log, identity, writer)


def open_publisher(
    learner: str,
    policy: PolicyTrainer,
    announced: dict[int, PolicyVersion],
    part: OpenPart[RetryingWriter] | None,
) -> VersionPublisher:
    """The publisher of the policy's versions. In a process that does not write, it only trains."""
    if part is None:
        return VersionPublisher(learner, policy, announced, writer=None)
    return VersionPublisher(
        learner,
        policy,
        announced,
        writer=part.writer,
        meter=part.meter,
        check_rival=part.writer.check_rival,
    )
