"""Which rewards a session has, and whether its rollout waits for others.

The rewards of a session are in turns.<env>, in one partition with its calls and its end. So the
gateway, which answers the sender of a reward, and the assembler, which makes the rollout, count the
same rewards for it, whatever the order in which they read their topics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from streamrl.stream.records import Reward
from streamrl.stream.records.limits import MAX_REWARD_NAMES

MAX_REWARDS = 65_536  # of a session: its names, for the whole rollout and for single calls


class RewardProgress(msgspec.Struct):
    """The rewards of a session up to a record of its partition.

    A rollout is complete once its session has ended and has each name that it waits for (or any
    one, if it waits for none by name). A name is there if a reward of it came before the end, or if
    it was given to the whole rollout, or to every call. So rewards of single calls that come after
    the end count all; a reward of the whole rollout, sent last, completes it earlier.
    """

    given: dict[str, dict[str, bool]] = {}  # by name and call (empty: the rollout): has it failed?
    count: int = 0
    failures: int = 0
    answers: dict[str, None] | None = None  # the calls that train; None: it has not ended
    early: dict[str, None] = {}  # names that came before the end
    # Calls that train and have a reward, by its name. Those of any name are under the empty name.
    rewarded: dict[str, dict[str, None]] = {}

    def problem(self, reward: Reward) -> str:
        """Why the reward cannot be added; empty if it can."""
        calls = self.given.get(reward.name)
        if calls is None and len(self.given) >= MAX_REWARD_NAMES:
            return f"it has rewards of {MAX_REWARD_NAMES} names, which is the most"
        if self.count >= MAX_REWARDS and reward.call not in (calls or {}):
            return f"it has {MAX_REWARDS:,} rewards, which is the most"
        return ""

    def add(self, reward: Reward) -> None:
        """Count a reward that has no problem. The last one of a name and call counts."""
        calls = self.given.setdefault(reward.name, {})
        if reward.call not in calls:
            self.count += 1
            self._count_answer(reward.name, reward.call)
        self.failures += bool(reward.failure) - calls.get(reward.call, False)
        calls[reward.call] = bool(reward.failure)

    def end(self, answers: Iterable[str], failure: str) -> None:
        """Note that the session has ended. `answers`: the calls that its rollout trains on;
        `failure`: of the session, which then waits for nothing.
        """
        self.failures += bool(failure)
        self.answers = dict.fromkeys(answers)
        self.early = dict.fromkeys(self.given)
        for name, calls in self.given.items():
            for call in calls:
                self._count_answer(name, call)

    def is_complete(self, wanted: Sequence[str]) -> bool:
        """Whether the session has ended and its rollout waits for no reward. `wanted`: the names
        that it waits for. It waits for no other once one has failed.
        """
        if self.answers is None:
            return False
        if self.failures:
            return True
        if wanted:
            return all(self._is_there(name) for name in wanted)
        return bool(self.early) or self._is_given_to_all("") or any(map(self._is_there, self.given))

    def has_any_of_each(self, wanted: Sequence[str]) -> bool:
        """Whether there is a rollout to make where no more rewards are waited for."""
        if self.failures:
            return True
        return all(name in self.given for name in wanted) if wanted else bool(self.given)

    def _is_there(self, name: str) -> bool:
        return name in self.early or "" in self.given.get(name, {}) or self._is_given_to_all(name)

    def _is_given_to_all(self, name: str) -> bool:
        return bool(self.answers) and len(self.rewarded.get(name, {})) == len(self.answers or {})

    def _count_answer(self, name: str, call: str) -> None:
        if self.answers is not None and call in self.answers:
            self.rewarded.setdefault(name, {})[call] = None
            self.rewarded.setdefault("", {})[call] = None
