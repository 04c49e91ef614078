"""SessionAssembler: how sessions become rollouts. Each session becomes one rollout, once; what
belongs to no session is dead-lettered.

All records of a session are in one partition, and what becomes of it depends on their order only.
Time enters as a record, too: where a session has waited for too long, the assembler writes its last
end, and acts when it reads that. So the gateway knows of each reward whether it counts.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from streamrl.config import topology
from streamrl.envs.sessions.names import short_name
from streamrl.envs.sessions.rollouts import kept_calls
from streamrl.extensions.assembler.rollouts import (
    assemble_failed_rollout,
    assemble_rollout,
    valid_calls,
)
from streamrl.extensions.assembler.state import (
    AssemblerState,
    EnvSessions,
    OpenSession,
    PartialGroup,
    RemovedSession,
    SessionRules,
)
from streamrl.stream.log.dead_letters import to_dead_letter
from streamrl.stream.log.protocol import Event, Offsets, Output
from streamrl.stream.records import (
    ENV_REMOVED,
    ModelCall,
    Reward,
    Rollout,
    SessionEnd,
    SessionStart,
)

CHECK_S = 1.0  # between two checks of the time limits
MAX_CALLS = 16_384  # of a session; a gateway takes fewer
MAX_HEADER_BYTES = 65_536  # of a record that is held


class SessionAssembler:
    """The sessions of one env in one step. It changes the state and adds to `outputs`."""

    def __init__(
        self,
        env: str,
        rules: SessionRules,
        state: AssemblerState,
        time_s: float,
        outputs: list[Output],
    ) -> None:
        self._env = env
        self._rules = rules
        self._state = state
        self._time_s = time_s
        self._outputs = outputs

    @property
    def _awake_s(self) -> float:
        return self._state.clock.awake_s

    @property
    def _sessions(self) -> EnvSessions:
        return self._state.envs.setdefault(self._env, EnvSessions())

    # ---- events ------------------------------------------------------------------------------

    def on_start(self, event: Event, start: SessionStart) -> None:
        """A session begins. One that has begun already continues (its agent was restarted)."""
        if start.environment != self._env or event.key != start.session:
            cause = (
                f"a session of {start.environment!r} with key {event.key!r} in turns.{self._env}"
            )
            self._dead_letter(event, f"{cause}; its key is {start.session!r}")
            return
        known = self._sessions.open.get(start.session)
        if known is not None:
            if known.end is None and self._may_be_held(event):
                known.last_s = self._awake_s
                known.restart = event
        elif self._may_be_held(event):
            self._sessions.open[start.session] = OpenSession(
                start=event,
                problem_id=start.problem_id,
                group_id=short_name(start.group_id) or self._next_group(start),
                last_s=self._awake_s,
            )

    def on_call(self, event: Event, call: ModelCall) -> None:
        session = self._sessions.open.get(call.session)
        if session is None:
            self._dead_letter(event, f"there is no open session {call.session!r}")
        elif session.end is not None:
            self._dead_letter(event, f"session {call.session!r} has ended")
        elif len(session.calls) >= MAX_CALLS:
            self._dead_letter(
                event, f"session {call.session!r} has {MAX_CALLS:,} calls, which is the most"
            )
        elif self._may_be_held(event):
            session.calls.append(event)
            session.last_s = self._awake_s

    def on_end(self, event: Event, end: SessionEnd) -> None:
        """A session ends. If it is over already, this changes nothing."""
        session = self._sessions.open.get(end.session)
        if session is None:
            return
        is_first = session.end is None
        if is_first:
            session.end = event
            session.last_s = self._awake_s
            calls = kept_calls(valid_calls(calls_of(session)))
            answers = [call.call for call in calls if call.trained]
            session.progress.end(answers, end.failure)
        if not end.is_last:
            if is_first:
                self._publish_if_complete(end.session, session)
        elif session.progress.has_any_of_each(self._rules.rewards):
            self._publish(end.session, session)
        elif is_first:
            cause = f"it was not ended, and nothing happened for {self._rules.idle_s:g} s"
            self._fail(end.session, session, cause)
        else:
            cause = f"its rewards did not come within {self._rules.reward_wait_s:g} s"
            self._fail(end.session, session, cause)

    def on_reward(self, event: Event, reward: Reward) -> None:
        session = self._sessions.open.get(reward.rollout)
        if session is None:
            self._dead_letter(event, f"no session {reward.rollout!r} waits for a reward")
        elif problem := session.progress.problem(reward):
            self._dead_letter(event, f"session {reward.rollout!r}: {problem}")
        elif self._may_be_held(event):
            session.progress.add(reward)
            session.rewards.setdefault(reward.name, {})[reward.call] = event
            session.last_s = self._awake_s
            self._publish_if_complete(reward.rollout, session)

    # ---- time --------------------------------------------------------------------------------

    def check_time_limits(self) -> None:
        """Write the last end of sessions that have waited for too long, and close groups."""
        rules = self._rules
        sessions = self._sessions
        for name, session in sessions.open.items():
            limit_s = rules.idle_s if session.end is None else rules.reward_wait_s
            if not session.is_closing and self._state.clock.has_waited(session.last_s, limit_s):
                session.is_closing = True
                truncation = "time" if session.end is None else ""
                end = SessionEnd(
                    session=name, truncation=truncation, time_s=self._time_s, is_last=True
                )
                self._outputs.append(Output(topology.turns(self._env), name, end))
        for problem, group in list(sessions.groups.items()):
            if self._state.clock.has_waited(group.last_s, rules.idle_s + rules.reward_wait_s):
                del sessions.groups[problem]

    # ---- inside ------------------------------------------------------------------------------

    def _next_group(self, start: SessionStart) -> str:
        """The group of the next session of a problem, where none is given. A group is named
        after its first session.
        """
        groups = self._sessions.groups
        group = groups.get(start.problem_id)
        if group is None:
            name = short_name(f"{short_name(start.problem_id)}:{start.session}")
            group = PartialGroup(name, 0, self._awake_s)
            groups[start.problem_id] = group
        group.sessions += 1
        group.last_s = self._awake_s
        if group.sessions >= self._rules.group_size:
            del groups[start.problem_id]
        return group.group_id

    def _publish_if_complete(self, name: str, session: OpenSession) -> None:
        """Publish the session's rollout if it has ended and waits for no reward."""
        if session.progress.is_complete(self._rules.rewards):
            self._publish(name, session)

    def _publish(self, name: str, session: OpenSession) -> None:
        assert session.end is not None
        assert isinstance(session.end.record, SessionEnd)
        rollout = assemble_rollout(
            start_of(session),
            session.group_id,
            calls_of(session),
            rewards_of(session),
            session.end.record,
            self._rules.reward_weights,
        )
        self._close(name, session, rollout)

    def _fail(self, name: str, session: OpenSession, cause: str) -> None:
        failed = assemble_failed_rollout(start_of(session), session.group_id, cause)
        self._close(name, session, failed)

    def _close(self, name: str, session: OpenSession, rollout: Rollout) -> None:
        """Publish the session's rollout, with the number of sessions that its group waits for."""
        sessions = self._sessions.open
        del sessions[name]
        siblings = sum(other.group_id == session.group_id for other in sessions.values())
        msgspec.structs.force_setattr(rollout, "open_sessions", siblings)
        self._outputs.append(rollout_output(self._env, rollout))

    def _may_be_held(self, event: Event) -> bool:
        """Whether the state has room for the record with its headers."""
        size = sum(len(name) + len(value or b"") for name, value in event.headers)
        if size > MAX_HEADER_BYTES:
            cause = f"its headers have {size:,} bytes; {MAX_HEADER_BYTES:,} are the most"
            self._dead_letter(event, cause)
        return size <= MAX_HEADER_BYTES

    def _dead_letter(self, event: Event, cause: str) -> None:
        self._outputs.extend(to_dead_letter(event, cause))


# ---- settings and retention ----------------------------------------------------------------------


def remove_env(state: AssemblerState, env: str) -> None:
    """Forget the records of an env that is not in the run any more. Its topics may not be read or
    written now, and may be gone.
    """
    removed = [
        RemovedSession(name, session.problem_id, session.group_id)
        for name, session in state.envs.pop(env).open.items()
    ]
    state.sessions_of_removed_envs.setdefault(env, []).extend(removed)


def restore_env(state: AssemblerState, env: str) -> list[Output]:
    """Fail the sessions that were open when the env, which is in the run again, was taken out."""
    outputs = list[Output]()
    for removed in state.sessions_of_removed_envs.pop(env):
        start = SessionStart(
            session=removed.session, environment=env, problem_id=removed.problem_id
        )
        failed = assemble_failed_rollout(start, removed.group_id, ENV_REMOVED)
        outputs.append(rollout_output(env, failed))
    return outputs


def expire_removed(env: str, sessions: EnvSessions, removed: Offsets) -> list[Output]:
    """Fail the sessions of which retention has deleted a record: everything below the offsets of
    `removed`.
    """
    outputs = list[Output]()

    def is_gone(event: Event) -> bool:
        return event.offset < removed.get((event.topic, event.partition), 0)

    for name, session in list(sessions.open.items()):
        events = [session.start, *session.calls, *reward_events(session)]
        events += [event for event in (session.restart, session.end) if event is not None]
        if any(map(is_gone, events)):
            del sessions.open[name]
            start = SessionStart(session=name, environment=env, problem_id=session.problem_id)
            cause = "retention has deleted records of the session; raise topics.retention_hours"
            failed = assemble_failed_rollout(start, session.group_id, cause)
            outputs.append(rollout_output(env, failed))
    return outputs


# ---- what a session has --------------------------------------------------------------------------


def rollout_output(env: str, rollout: Rollout) -> Output:
    return Output(topology.rollouts(env), rollout.group_id, rollout)


def is_check_due(state: AssemblerState) -> bool:
    """Whether the limits on waiting are to be checked again."""
    return state.clock.awake_s - state.checked_s >= CHECK_S


def start_of(session: OpenSession) -> SessionStart:
    assert isinstance(session.start.record, SessionStart)
    return session.start.record


def calls_of(session: OpenSession) -> list[ModelCall]:
    return [event.record for event in session.calls if isinstance(event.record, ModelCall)]


def reward_events(session: OpenSession) -> list[Event]:
    return [event for by_call in session.rewards.values() for event in by_call.values()]


def rewards_of(session: OpenSession) -> list[Reward]:
    """The last reward of each name and call."""
    return [e.record for e in reward_events(session) if isinstance(e.record, Reward)]


def counts(sessions: Mapping[str, OpenSession]) -> tuple[int, int]:
    """How many sessions are open, and how many of these have ended and wait for rewards."""
    return len(sessions), sum(session.end is not None for session in sessions.values())
