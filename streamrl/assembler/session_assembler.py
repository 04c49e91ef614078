"""SessionAssembler: how sessions become rollouts. Each session becomes one rollout, once; what
belongs to no session is put aside as a dead letter.
"""

from __future__ import annotations

from collections.abc import Mapping

from streamrl.assembler.rollouts import assemble_failed_rollout, assemble_rollout, last_of_each
from streamrl.assembler.state import (
    AssemblerConfig,
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
from streamrl.records import ModelCall, Reward, Rollout, SessionEnd, SessionStart

CHECK_S = 1.0  # between two looks at limits of time
MAX_CALLS = 16_384  # of a session; a gateway allows `gateway.max_calls`
MAX_REWARDS = 65_536  # of a session; an agent may give some for each call, again and again
ENV_REMOVED = "its env was taken out of the run"


class SessionAssembler:
    """One step of the assembler: it changes the state and collects the outputs."""

    def __init__(self, config: AssemblerConfig, state: AssemblerState, time_s: float) -> None:
        self.config = config
        self.state = state
        self.time_s = time_s
        self.outputs = list[Output]()

    # ---- events ------------------------------------------------------------------------------

    def on_start(self, event: Event, start: SessionStart) -> None:
        """A session begins. A session that has begun already goes on (its agent was restarted)."""
        env = topology.subject_of(event.topic)
        if start.environment != env or event.key != start.session:
            cause = f"a session of {start.environment!r} with key {event.key!r} in turns.{env}"
            self.outputs += to_dead_letter(event, f"{cause}; its key is {start.session!r}")
            return
        sessions = self._sessions_of(event)
        known = sessions.open.get(start.session)
        if known is not None:
            known.last_s = self.time_s
            return
        early = sessions.unclaimed.pop(start.session, None)
        sessions.open[start.session] = OpenSession(
            start=event,
            problem_id=start.problem_id,
            group_id=start.group_id or self._next_group(event, start),
            last_s=self.time_s,
            rewards=early.rewards if early is not None else [],
        )

    def on_call(self, event: Event, call: ModelCall) -> None:
        session = self._open_session(event, call.session)
        if session is None:
            return
        cause = ""
        if session.end is not None:
            cause = f"session {call.session!r} has ended"
        elif len(session.calls) >= MAX_CALLS:
            cause = f"session {call.session!r} has {MAX_CALLS:,} calls, which is the most"
        if cause:
            self.outputs += to_dead_letter(event, cause)
            return
        session.calls.append(event)
        session.last_s = self.time_s

    def on_end(self, event: Event, end: SessionEnd) -> None:
        """A session ends. If it is over already, this changes nothing: it may be our own record."""
        session = self._sessions_of(event).open.get(end.session)
        if session is None or session.end is not None:
            return
        session.end = event
        session.last_s = self.time_s
        self._maybe_publish(event, end.session, session)

    def on_reward(self, event: Event, reward: Reward) -> None:
        if reward.rescored:
            return
        sessions = self._sessions_of(event)
        session = sessions.open.get(reward.rollout)
        held = session or sessions.unclaimed.setdefault(
            reward.rollout, UnclaimedRewards(since_s=self.time_s)
        )
        if len(held.rewards) >= MAX_REWARDS:
            cause = f"session {reward.rollout!r} has {MAX_REWARDS:,} rewards, which is the most"
            self.outputs += to_dead_letter(event, cause)
            return
        held.rewards.append(event)
        if session is None:
            return
        session.last_s = self.time_s
        self._maybe_publish(event, reward.rollout, session)

    # ---- time --------------------------------------------------------------------------------

    def check_time_limits(self) -> None:
        """End the sessions that have waited for too long, and put aside what nobody waits for."""
        if not is_check_due(self.state, self.time_s):
            return
        self.state.checked_s = self.time_s
        for env, sessions in self.state.envs.items():
            rules = self.config.envs.get(env)
            if rules is None:
                continue
            for name, session in list(sessions.open.items()):
                self._check_session(env, rules, name, session)
            for name, unclaimed in list(sessions.unclaimed.items()):
                if self._waited(unclaimed.since_s, rules.reward_wait_s):
                    del sessions.unclaimed[name]
                    for event in unclaimed.rewards:
                        cause = f"no session {name!r} waits for this reward"
                        self.outputs += to_dead_letter(event, cause)
            for problem, group in list(sessions.groups.items()):
                if self._waited(group.last_s, rules.idle_s + rules.reward_wait_s):
                    del sessions.groups[problem]

    def _check_session(
        self, env: str, rules: SessionRules, name: str, session: OpenSession
    ) -> None:
        if session.end is not None:
            if self._waited(session.last_s, rules.reward_wait_s):
                waited = f"its rewards did not come within {rules.reward_wait_s:g} s"
                self._fail(env, name, session, waited)
            return
        if not self._waited(session.last_s, rules.idle_s):
            return
        # The gateway must know, or it would answer calls that belong to no rollout.
        end = SessionEnd(session=name, truncation="time", time_s=self.time_s)
        self.outputs.append(Output(topology.turns(env), name, end))
        if has_rewards(rules, session):
            self._publish(env, name, session)
        else:
            idle = f"nobody ended it, and nothing happened for {rules.idle_s:g} s"
            self._fail(env, name, session, idle)

    def _waited(self, since_s: float, limit_s: float) -> bool:
        return self.time_s - since_s >= limit_s

    # ---- settings and retention --------------------------------------------------------------

    def remove_env(self, env: str) -> None:
        """Let go of the sessions of an env that is not in the run any more."""
        sessions = self.state.envs.pop(env)
        for name, session in sessions.open.items():
            start = start_of(session)
            failed = assemble_failed_rollout(start, session.group_id, ENV_REMOVED, 0)
            self._write(env, name, failed)
        for unclaimed in sessions.unclaimed.values():
            for event in unclaimed.rewards:
                self.outputs += to_dead_letter(event, ENV_REMOVED)

    def expire_removed(self, env: str, removed: Offsets) -> None:
        """Let go of sessions of which retention has deleted a record: all that is below the offsets
        of `removed`.
        """
        sessions = self.state.envs[env]

        def is_gone(event: Event) -> bool:
            return event.offset < removed.get((event.topic, event.partition), 0)

        for name, session in list(sessions.open.items()):
            held = [session.start, *session.calls, *session.rewards]
            if session.end is not None:
                held.append(session.end)
            if any(map(is_gone, held)):
                del sessions.open[name]
                start = SessionStart(session=name, environment=env, problem_id=session.problem_id)
                cause = "retention has deleted records of the session; raise topics.retention_hours"
                self._write(env, name, assemble_failed_rollout(start, session.group_id, cause, 0))
        for name, unclaimed in list(sessions.unclaimed.items()):
            unclaimed.rewards = [event for event in unclaimed.rewards if not is_gone(event)]
            if not unclaimed.rewards:
                del sessions.unclaimed[name]

    # ---- inside ------------------------------------------------------------------------------

    def _sessions_of(self, event: Event) -> EnvSessions:
        env = topology.subject_of(event.topic)
        return self.state.envs.setdefault(env, EnvSessions())

    def _open_session(self, event: Event, name: str) -> OpenSession | None:
        session = self._sessions_of(event).open.get(name)
        if session is None:
            self.outputs += to_dead_letter(event, f"there is no open session {name!r}")
        return session

    def _next_group(self, event: Event, start: SessionStart) -> str:
        """The group of the next session of a problem, where nobody has said it. A group is named
        after its first session.
        """
        sessions = self._sessions_of(event)
        rules = self.config.envs[topology.subject_of(event.topic)]
        group = sessions.groups.get(start.problem_id)
        if group is None:
            group = PartialGroup(f"{start.problem_id}:{start.session}", 0, self.time_s)
            sessions.groups[start.problem_id] = group
        group.sessions += 1
        group.last_s = self.time_s
        if group.sessions >= rules.group_size:
            del sessions.groups[start.problem_id]
        return group.group_id

    def _maybe_publish(self, event: Event, name: str, session: OpenSession) -> None:
        env = topology.subject_of(event.topic)
        if session.end is None:
            return
        end = session.end.record
        failed = isinstance(end, SessionEnd) and bool(end.failure)
        if failed or has_rewards(self.config.envs[env], session):
            self._publish(env, name, session)

    def _publish(self, env: str, name: str, session: OpenSession) -> None:
        end = session.end.record if session.end is not None else None
        rollout = assemble_rollout(
            start_of(session),
            session.group_id,
            [event.record for event in session.calls if isinstance(event.record, ModelCall)],
            rewards_of(session),
            end if isinstance(end, SessionEnd) else None,
            self.config.envs[env].reward_weights,
        )
        del self.state.envs[env].open[name]
        self._write(env, name, rollout)

    def _fail(self, env: str, name: str, session: OpenSession, cause: str) -> None:
        del self.state.envs[env].open[name]
        self._write(
            env, name, assemble_failed_rollout(start_of(session), session.group_id, cause, 0)
        )

    def _write(self, env: str, name: str, rollout: Rollout) -> None:
        self.outputs.append(Output(topology.rollouts(env), rollout.group_id, rollout))


def is_check_due(state: AssemblerState, time_s: float) -> bool:
    """Whether the limits of time are to be looked at again. They are if the clock was set back."""
    return abs(time_s - state.checked_s) >= CHECK_S


def start_of(session: OpenSession) -> SessionStart:
    assert isinstance(session.start.record, SessionStart)
    return session.start.record


def rewards_of(session: OpenSession) -> list[Reward]:
    return [event.record for event in session.rewards if isinstance(event.record, Reward)]


def has_rewards(rules: SessionRules, session: OpenSession) -> bool:
    """Are all the rewards there that a rollout waits for? One that has failed is there."""
    rewards = last_of_each(rewards_of(session))
    given = {reward.name for reward in rewards}
    if any(reward.failure for reward in rewards):
        return True
    return given.issuperset(rules.rewards) if rules.rewards else bool(given)


def counts(sessions: Mapping[str, OpenSession]) -> tuple[int, int]:
    """How many sessions are open, and how many of these have ended and wait for rewards."""
    return len(sessions), sum(session.end is not None for session in sessions.values())
