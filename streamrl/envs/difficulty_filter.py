"""Which problems are left out for a while: those that the policy, when it last met them, nearly
always or nearly never solved.

Their groups would have no advantages, or a few lucky ones (online difficulty filtering:
arXiv:2504.03380; DAPO, arXiv:2503.14476, does it behind generation). What is known of a problem is
its visits, which the env's replicas publish with their rollouts to `visits.<env>`, and all of them
read: that topic is the state. It is compacted, with a key for each visit that may still count, so a
restart finds them all and no two replicas write one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from streamrl.config.goals import reaches
from streamrl.config.run_file import PassRate
from streamrl.envs.dataset_order import Place
from streamrl.records import Rollout, Visit


def rests(rules: PassRate, visits: Iterable[Visit], epoch: int) -> bool:
    """Is a problem left out of an epoch, by its visits in earlier ones? One with fewer than
    `visits` is not.

    It is, for the `rest_epochs` epochs behind its last visit, when of the rollouts of its last
    `visits` ones a share outside `low` to `high` passed.
    """
    last = sorted(
        (visit for visit in visits if visit.epoch < epoch), key=lambda visit: visit.epoch
    )[-rules.visits :]
    if len(last) < rules.visits or epoch - last[-1].epoch > rules.rest_epochs:
        return False
    rate = sum(visit.passed for visit in last) / sum(visit.rollouts for visit in last)
    return not rules.low <= rate <= rules.high


def visit_of(
    rules: PassRate, environment: str, place: Place, rollouts: Sequence[Rollout]
) -> Visit | None:
    """What a group says of its problem; None when none of its rollouts came to an end that can be
    judged.
    """
    judged = [rollout for rollout in rollouts if not (rollout.failure or rollout.misaligned)]
    if not judged:
        return None
    earned = [
        rollout.rewards.get(rules.reward, 0.0) if rules.reward else rollout.reward
        for rollout in judged
    ]
    return Visit(
        environment=environment,
        problem=place.problem,
        epoch=place.epoch,
        passed=sum(reaches(reward, rules.at_least) for reward in earned),
        rollouts=len(judged),
        policy_version=max(rollout.newest_policy_version for rollout in judged),
    )


class Visits:
    """What is known of an env's problems: a fold over their visits, in any order. `place`: which
    problem a number poses, and in which epoch.
    """

    def __init__(self, rules: PassRate, environment: str, place: Callable[[int], Place]) -> None:
        self.rules, self.environment, self._place = rules, environment, place
        self._by_problem: dict[int, dict[int, Visit]] = {}

    def hear(self, visit: Visit) -> None:
        """A later visit takes the slot of the one that it outdates."""
        slots = self._by_problem.setdefault(visit.problem, {})
        slot = self._slot(visit)
        if slot not in slots or slots[slot].epoch <= visit.epoch:
            slots[slot] = visit

    def rests(self, number: int) -> bool:
        """Is the problem of this number left out?"""
        place = self._place(number)
        return rests(self.rules, self._by_problem.get(place.problem, {}).values(), place.epoch)

    def made(self, number: int, rollouts: Sequence[Rollout]) -> Visit | None:
        """What a group says of its problem. It is heard like that of other replicas: when it is in
        the log.
        """
        return visit_of(self.rules, self.environment, self._place(number), rollouts)

    def key(self, visit: Visit) -> str:
        """Of its record: compaction keeps the newest visit of each."""
        return f"{visit.problem}-{self._slot(visit)}"

    def _slot(self, visit: Visit) -> int:
        """Between two visits lie at most `rest_epochs` epochs, so that the last `visits` of them
        have slots of their own.
        """
        return visit.epoch % (self.rules.visits * (self.rules.rest_epochs + 1))
