"""The sessions of a run, as the records of turns.<env> tell of them.

Each replica of the gateway has such an index. They are equal once the replicas have read the same
records, so any replica can handle any call.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from streamrl.envs.sessions.call_tree import CallTree, InvalidCall
from streamrl.envs.sessions.keys import SessionName
from streamrl.envs.sessions.reward_progress import RewardProgress
from streamrl.envs.sessions.rollouts import kept_calls
from streamrl.extensions.gateway.requests import RequestRejected
from streamrl.stream.records import ModelCall, Record, Reward, SessionEnd, SessionStart
from streamrl.system.text import one_line

logger = logging.getLogger(__name__)

DIGITS = 9  # of the number of a request among those with the same body
# What the messages of a session may be longer than its tokens. Real ones have 1 to 8 bytes a token.
BYTES_PER_TOKEN = 256
FREE_BYTES = 1_000_000
MAX_CLOSED = 100_000  # sessions of which it is remembered that their rollout was made
MAX_REMEMBERED = 256  # rewards of such a session that are known when they are sent again
MAX_REMEMBERED_OF_ALL = 1_000_000  # of all such sessions together, so in about 100 MB


class SessionRewards:
    """The rewards of a session whose rollout has not been made, or was made just now."""

    def __init__(self) -> None:
        self.progress = RewardProgress()
        self.calls: set[str] = set()
        self.counted: set[Reward] = set()  # those that its rollout has, or has had for a while
        self.is_complete = False  # Has its rollout been made?

    def add(self, reward: Reward) -> None:
        """Count the next reward of the log, if the session has room for it."""
        if not self.progress.problem(reward):
            self.progress.add(reward)
            self.counted.add(reward)


class LiveSession:
    """A session that has not ended, and its calls."""

    def __init__(self, env: str, start: SessionStart) -> None:
        self.env = env
        self.start = start
        self.tree = CallTree()
        # Increases with each change after which a request may have another name or position.
        self.revision = 0
        self.starts = 1
        self.started_s = float("-inf")  # when the agent was started again, if it was
        self.answer_counts: dict[str, int] = {}  # by the name of the request
        self.message_bytes = 0  # of the messages that are recorded
        self._tokens = 0
        # The ordinal after those in use since the agent was last started, by the digest of a body:
        self._next_recorded: dict[str, int] = {}  # requests that began since and have an answer
        self._next_reserved: dict[str, int] = {}  # requests that this replica has begun to answer
        self.rewards = SessionRewards()

    @property
    def name(self) -> SessionName:
        return SessionName(self.env, self.start.session)

    def add(self, call: ModelCall) -> None:
        """Add the next call of the log, unless its request has been answered already."""
        if not self.tree.add(call):
            return
        self.message_bytes += message_bytes(call)
        self._tokens += len(call.prompt) + len(call.tokens)
        self.revision += 1
        self.rewards.calls.add(call.call)
        self.answer_counts[call.request] = self.answer_counts.get(call.request, 0) + 1
        body, _, ordinal = call.request.rpartition("#")
        began_s = call.time_s - call.inference_metadata.latency_s
        # The agent will repeat a request that was in flight when it was killed.
        if ordinal.isdecimal() and len(ordinal) <= DIGITS and began_s >= self.started_s:
            self._next_recorded[body] = max(self._next_recorded.get(body, 0), int(ordinal) + 1)

    def check_message_bytes(self, new_bytes: int, new_tokens: int) -> None:
        """Raises RequestRejected if the messages of the session would be much longer than what the
        policy has read of them: a chat template may show nothing of what is recorded.
        """
        limit = FREE_BYTES + BYTES_PER_TOKEN * (self._tokens + new_tokens)
        if self.message_bytes + new_bytes > limit:
            raise RequestRejected(
                413,
                f"the messages of the session have more than {limit:,} bytes, which is"
                f" {BYTES_PER_TOKEN} for each token that the policy has read, and {FREE_BYTES:,}"
                " more; leave out what its chat template does not show",
                field="messages",
            )

    def next_ordinal(self, body: str) -> int:
        """The ordinal of a new request with a body of this digest."""
        return max(self._next_recorded.get(body, 0), self._next_reserved.get(body, 0))

    def reserve_ordinal(self, body: str, ordinal: int) -> None:
        """This replica answers this request, so a new one with the same body is the next one."""
        self.revision += 1
        self._next_reserved[body] = max(self._next_reserved.get(body, 0), ordinal + 1)

    def release_ordinal(self, body: str, ordinal: int) -> None:
        """The request was not answered, so a new one with the same body is this one again."""
        if self._next_reserved.get(body) == ordinal + 1:
            self.revision += 1
            if ordinal:
                self._next_reserved[body] = ordinal
            else:
                del self._next_reserved[body]

    def start_again(self, time_s: float) -> None:
        """The agent was killed and repeats its calls from the first one. It gets the recorded
        answers as long as its requests are the same.
        """
        self.revision += 1
        self.starts += 1
        self.started_s = time_s
        self._next_recorded.clear()
        self._next_reserved.clear()


def message_bytes(call: ModelCall) -> int:
    """The size of what a call records of its messages."""
    return len(msgspec.json.encode(call.messages)) + len(msgspec.json.encode(call.tool_calls))


class SessionIndex:
    """The sessions of all envs."""

    def __init__(
        self,
        wanted: Mapping[str, Sequence[str]],
        on_session_end: Callable[[LiveSession], None] = lambda session: None,
        max_closed: int = MAX_CLOSED,
        group_sizes: Mapping[str, int] | None = None,
    ) -> None:
        """`wanted`: by env, the names of the rewards that a session waits for. `group_sizes`: by
        env, the sessions of a group.
        """
        self._groups = SessionGroups(group_sizes or {})
        self.sessions: dict[SessionName, LiveSession] = {}
        self.waiting: dict[SessionName, SessionRewards] = {}  # of sessions that have ended
        # Sessions whose rollout has been made, the oldest first, with hashes of their rewards, so
        # that a request that is sent again is known.
        self.closed: dict[SessionName, frozenset[int]] = {}
        self._wanted = wanted
        self._on_session_end = on_session_end
        self._max_closed = max_closed
        self._remembered_rewards = 0

    def apply(self, env: str, record: Record) -> None:
        """Add the next record of turns.<env>."""
        match record:
            case SessionStart():
                self._on_start(SessionName(env, record.session), record)
            case ModelCall():
                self._on_call(SessionName(env, record.session), record)
            case Reward():
                self._on_reward(SessionName(env, record.rollout), record)
            case SessionEnd():
                self._on_end(SessionName(env, record.session), record)
            case _:
                pass

    def has_ended(self, name: SessionName) -> bool:
        return name in self.waiting or name in self.closed

    def is_open(self, session: LiveSession) -> bool:
        """Whether the session has not ended since it was looked up here."""
        return self.sessions.get(session.name) is session

    def rewards_of(self, name: SessionName) -> SessionRewards | None:
        """The rewards of the session; None if one more would not count."""
        session = self.sessions.get(name)
        return session.rewards if session is not None else self.waiting.get(name)

    def count_open(self, env: str) -> int:
        """The number of sessions of an env that have not ended."""
        return sum(name.env == env for name in self.sessions)

    def count_waiting(self, env: str) -> int:
        """The number of sessions of an env that have ended and wait for rewards."""
        return sum(name.env == env for name in self.waiting)

    def count_outstanding(self, env: str) -> int:
        """The number of sessions of an env whose rollout is not in a closed group, as far as it can
        be known here: they are open, or wait for rewards or for the others of their group.
        """
        return self._groups.count(env)

    def _on_start(self, name: SessionName, start: SessionStart) -> None:
        if self.has_ended(name):
            return
        session = self.sessions.get(name)
        if session is None:
            self.sessions[name] = LiveSession(name.env, start)
            self._groups.add(name, start.group_id or start.problem_id)
        else:
            session.start_again(start.time_s)

    def _on_call(self, name: SessionName, call: ModelCall) -> None:
        session = self.sessions.get(name)
        if session is None:  # it has ended, or its beginning is no longer kept
            return
        try:
            session.add(call)
        except InvalidCall as error:
            logger.warning("session %r of %s: %s", name.session, name.env, one_line(error))

    def _on_reward(self, name: SessionName, reward: Reward) -> None:
        rewards = self.rewards_of(name)
        if rewards is not None:
            rewards.add(reward)
            self._close_if_complete(name, rewards)

    def _on_end(self, name: SessionName, end: SessionEnd) -> None:
        session = self.sessions.pop(name, None)
        if session is not None:
            self._on_session_end(session)
            kept = kept_calls(list(session.tree.calls.values()))
            session.rewards.progress.end((call.call for call in kept if call.trained), end.failure)
            self.waiting[name] = session.rewards
        rewards = self.waiting.get(name)
        if rewards is not None:
            rewards.is_complete = end.is_last
            self._close_if_complete(name, rewards)
        elif name not in self.closed:  # its beginning has not been read, as its rollout was made
            self._remember(name, frozenset())

    def _close_if_complete(self, name: SessionName, rewards: SessionRewards) -> None:
        """Forget all but a few rewards of a session whose rollout has been made."""
        if not rewards.is_complete and not rewards.progress.is_complete(self._wanted[name.env]):
            return
        rewards.is_complete = True
        self._groups.complete(name)
        self.waiting.pop(name, None)
        hashes = [reward_hash(reward) for reward in rewards.counted]
        self._remember(name, frozenset(hashes[:MAX_REMEMBERED]))

    def _remember(self, name: SessionName, rewards: frozenset[int]) -> None:
        """Remember that the session's rollout was made, for some time."""
        self.closed[name] = rewards
        self._remembered_rewards += len(rewards)
        while (
            len(self.closed) > self._max_closed or self._remembered_rewards > MAX_REMEMBERED_OF_ALL
        ):
            oldest = next(iter(self.closed))
            self._remembered_rewards -= len(self.closed.pop(oldest))


@dataclass
class SessionGroups:
    """Which sessions still count for their env: those without a rollout, and those whose group
    waits for such a session. Groups of a task are told apart by their size alone.
    """

    sizes: Mapping[str, int]  # of a group, by env
    _group_of: dict[SessionName, tuple[str, str]] = field(
        default_factory=dict[SessionName, tuple[str, str]]
    )
    # by group: its sessions without a rollout, and those with one
    _unfinished: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    _finished: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])

    def count(self, env: str) -> int:
        groups = (*self._unfinished.items(), *self._finished.items())
        return sum(sessions for (of, _), sessions in groups if of == env)

    def add(self, name: SessionName, group: str) -> None:
        """A session of the group has begun."""
        self._group_of[name] = (name.env, group)
        self._unfinished[name.env, group] += 1

    def complete(self, name: SessionName) -> None:
        """The rollout of the session is made. If its group is complete, or waits for no other
        session, all of it is closed.
        """
        group = self._group_of.pop(name, None)
        if group is None:
            return
        self._unfinished[group] -= 1
        self._finished[group] += 1
        if not self._unfinished[group] or self._finished[group] >= self.sizes.get(name.env, 0) > 0:
            del self._finished[group]
        if not self._unfinished[group]:
            del self._unfinished[group]


def reward_hash(reward: Reward) -> int:
    """The same for rewards that differ in their time only."""
    return hash((reward.name, reward.call, reward.value))
