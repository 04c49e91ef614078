"""SessionAssembler: how sessions become rollouts. Each session becomes one rollout, once; what
belongs to no session is put aside as a dead letter.
"""

from __future__ import annotations

from collections.abc import Mapping

from streamrl.assembler.rollouts import assemble_failed_rollout, assemble_rollout, last_of_each
from streamrl.assembler.state import (
    AssemblerState,
    EnvSessions,
    OpenSession,
    PartialGroup,
    SessionRules,
    UnclaimedRewards,
)
from streamrl.config import topology
from streamrl.log.dead_letters import to_dead_letter
from streamrl.log.protocol import Event, Offsets, Output
from streamrl.records import ENV_REMOVED, ModelCall, Reward, Rollout, SessionEnd, SessionStart

CHECK_S = 1.0  # between two checks of the time limits
MAX_CALLS = 16_384  # of a session; a gateway allows `gateway.max_calls`
MAX_REWARDS = 65_536  # of a session; an agent may give some for each call, again and again


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
    def _sessions(self) -> EnvSessions:
        return self._state.envs.setdefault(self._env, EnvSessions())

    # ---- events ------------------------------------------------------------------------------

    def on_start(self, event: Event, start: SessionStart) -> None:
        """A session begins. A session that has begun already goes on (its agent was restarted)."""
        if start.environment != self._env or event.key != start.session:
            cause = (
                f"a session of {start.environment!r} with key {event.key!r} in turns.{self._env}"
            )
            self._put_aside(event, f"{cause}; its key is {start.session!r}")
            return
        known = self._sessions.open.get(start.session)
        if known is not None:
            known.last_s = self._time_s
            return
        early = self._sessions.unclaimed.pop(start.session, None)
        self._sessions.open[start.session] = OpenSession(
            start=event,
            problem_id=start.problem_id,
            group_id=start.group_id or self._next_group(start),
            last_s=self._time_s,
            rewards=early.rewards if early is not None else [],
        )

    def on_call(self, event: Event, call: ModelCall) -> None:
        session = self._sessions.open.get(call.session)
        if session is None:
            self._put_aside(event, f"there is no open session {call.session!r}")
        elif session.end is not None:
            self._put_aside(event, f"session {call.session!r} has ended")
        elif len(session.calls) >= MAX_CALLS:
            self._put_aside(
                event, f"session {call.session!r} has {MAX_CALLS:,} calls, which is the most"
            )
        else:
            session.calls.append(event)
            session.last_s = self._time_s

    def on_end(self, event: Event, end: SessionEnd) -> None:
        """A session ends. If it is over already, this changes nothing: it may be our own record."""
        session = self._sessions.open.get(end.session)
        if session is None or session.end is not None:
            return
        session.end = event
        session.last_s = self._time_s
        self._publish_if_complete(end.session, session)

    def on_reward(self, event: Event, reward: Reward) -> None:
        if reward.rescored:
            return
        session = self._sessions.open.get(reward.rollout)
        holder = session or self._sessions.unclaimed.setdefault(
            reward.rollout, UnclaimedRewards(since_s=self._time_s)
        )
        if len(holder.rewards) >= MAX_REWARDS:
            self._put_aside(
                event, f"session {reward.rollout!r} has {MAX_REWARDS:,} rewards, which is the most"
            )
            return
        holder.rewards.append(event)
        if session is not None:
            session.last_s = self._time_s
            # Another reward completes nothing, and to look at all of them each time takes long.
            wanted = self._rules.rewards
            if reward.failure or not wanted or reward.name in wanted:
                self._publish_if_complete(reward.rollout, session)

    # ---- time --------------------------------------------------------------------------------

    def check_time_limits(self) -> None:
        """End the sessions that have waited for too long, and put aside what nobody waits for."""
        rules = self._rules
        sessions = self._sessions
        for name, session in list(sessions.open.items()):
            self._check_session(name, session)
        for name, unclaimed in list(sessions.unclaimed.items()):
            if self._waited(unclaimed.since_s, rules.reward_wait_s):
                del sessions.unclaimed[name]
                for event in unclaimed.rewards:
                    self._put_aside(event, f"no session {name!r} waits for this reward")
        for problem, group in list(sessions.groups.items()):
            if self._waited(group.last_s, rules.idle_s + rules.reward_wait_s):
                del sessions.groups[problem]

    def _check_session(self, name: str, session: OpenSession) -> None:
        rules = self._rules
        if session.end is not None:
            if self._waited(session.last_s, rules.reward_wait_s):
                self._fail(
                    name, session, f"its rewards did not come within {rules.reward_wait_s:g} s"
                )
            return
        if not self._waited(session.last_s, rules.idle_s):
            return
        # The gateway must know, or it would answer calls that belong to no rollout.
        end = SessionEnd(session=name, truncation="time", time_s=self._time_s)
        self._outputs.append(Output(topology.turns(self._env), name, end))
        if has_rewards(rules, session):
            self._publish(name, session)
        else:
            self._fail(
                name, session, f"nobody ended it, and nothing happened for {rules.idle_s:g} s"
            )

    def _waited(self, since_s: float, limit_s: float) -> bool:
        return self._time_s - since_s >= limit_s

    # ---- inside ------------------------------------------------------------------------------

    def _next_group(self, start: SessionStart) -> str:
        """The group of the next session of a problem, where nobody has said it. A group is named
        after its first session.
        """
        groups = self._sessions.groups
        group = groups.get(start.problem_id)
        if group is None:
            group = PartialGroup(f"{start.problem_id}:{start.session}", 0, self._time_s)
            groups[start.problem_id] = group
        group.sessions += 1
        group.last_s = self._time_s
        if group.sessions >= self._rules.group_size:
            del groups[start.problem_id]
        return group.group_id

    def _publish_if_complete(self, name: str, session: OpenSession) -> None:
        """Publish the session's rollout if it has ended and waits for no reward."""
        if session.end is None:
            return
        end = session.end.record
        has_failed = isinstance(end, SessionEnd) and bool(end.failure)
        if has_failed or has_rewards(self._rules, session):
            self._publish(name, session)

    def _publish(self, name: str, session: OpenSession) -> None:
        end = session.end.record if session.end is not None else None
        rollout = assemble_rollout(
            start_of(session),
            session.group_id,
            [event.record for event in session.calls if isinstance(event.record, ModelCall)],
            rewards_of(session),
            end if isinstance(end, SessionEnd) else None,
            self._rules.reward_weights,
        )
        del self._sessions.open[name]
        self._outputs.append(rollout_output(self._env, rollout))

    def _fail(self, name: str, session: OpenSession, cause: str) -> None:
        del self._sessions.open[name]
        failed = assemble_failed_rollout(start_of(session), session.group_id, cause)
        self._outputs.append(rollout_output(self._env, failed))

    def _put_aside(self, event: Event, cause: str) -> None:
        self._outputs.extend(to_dead_letter(event, cause))


# ---- settings and retention ----------------------------------------------------------------------


def remove_env(env: str, sessions: EnvSessions) -> list[Output]:
    """Fail the sessions of an env that is not in the run any more."""
    outputs = list[Output]()
    for session in sessions.open.values():
        failed = assemble_failed_rollout(start_of(session), session.group_id, ENV_REMOVED)
        outputs.append(rollout_output(env, failed))
    for unclaimed in sessions.unclaimed.values():
        for event in unclaimed.rewards:
            outputs += to_dead_letter(event, ENV_REMOVED)
    return outputs


def expire_removed(env: str, sessions: EnvSessions, removed: Offsets) -> list[Output]:
    """Fail the sessions of which retention has deleted a record, and forget rewards that it has
    deleted: everything below the offsets of `removed`.
    """
    outputs = list[Output]()

    def is_gone(event: Event) -> bool:
        return event.offset < removed.get((event.topic, event.partition), 0)

    for name, session in list(sessions.open.items()):
        events = [session.start, *session.calls, *session.rewards]
        if session.end is not None:
            events.append(session.end)
        if any(map(is_gone, events)):
            del sessions.open[name]
            start = SessionStart(session=name, environment=env, problem_id=session.problem_id)
            cause = "retention has deleted records of the session; raise topics.retention_hours"
            failed = assemble_failed_rollout(start, session.group_id, cause)
            outputs.append(rollout_output(env, failed))
    for name, unclaimed in list(sessions.unclaimed.items()):
        unclaimed.rewards = [event for event in unclaimed.rewards if not is_gone(event)]
        if not unclaimed.rewards:
            del sessions.unclaimed[name]
    return outputs


# ---- what a session has --------------------------------------------------------------------------


def rollout_output(env: str, rollout: Rollout) -> Output:
    return Output(topology.rollouts(env), rollout.group_id, rollout)


def is_check_due(state: AssemblerState, time_s: float) -> bool:
    """Whether the time limits are to be checked again. They are if the clock was set back."""
    return abs(time_s - state.checked_s) >= CHECK_S


def start_of(session: OpenSession) -> SessionStart:
    assert isinstance(session.start.record, SessionStart)
    return session.start.record


def rewards_of(session: OpenSession) -> list[Reward]:
    return [event.record for event in session.rewards if isinstance(event.record, Reward)]


def has_rewards(rules: SessionRules, session: OpenSession) -> bool:
    """Whether the session has all the rewards that its rollout waits for. It waits for no other
    once one has failed.
    """
    rewards = last_of_each(rewards_of(session))
    names = {reward.name for reward in rewards}
    if any(reward.failure for reward in rewards):
        return True
    return names.issuperset(rules.rewards) if rules.rewards else bool(names)


def counts(sessions: Mapping[str, OpenSession]) -> tuple[int, int]:
    """How many sessions are open, and how many of these have ended and wait for rewards."""
    return len(sessions), sum(session.end is not None for session in sessions.values())
