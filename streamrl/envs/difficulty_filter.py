"""Online difficulty filtering: problems that the policy nearly always or nearly never solved when
it last met them are left out for a while.

Their groups would have no advantages, or only a few by luck (arXiv:2504.03380; DAPO,
arXiv:2503.14476, filters after generation instead). What is known of a problem is its visits. The
replicas of an env publish them with their rollouts to `visits.<env>`, and every replica reads all
of them, so that topic is the state. It is compacted, and a visit that may still count has its
own key. A restart therefore finds all of those, and no two replicas write the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from streamrl.config.goals import reaches
from streamrl.config.sections.envs import AnyEnv, PassRate
from streamrl.envs.api import BaseEnv
from streamrl.envs.dataset_order import DatasetIndex
from streamrl.stream.records import Rollout, Visit
from streamrl.system.errors import ConfigError


def is_filtered(rules: PassRate, visits: Iterable[Visit], epoch: int) -> bool:
    """Whether a problem is left out of an epoch, judged by its visits in earlier epochs.

    It is left out for the `rest_epochs` epochs after its last visit if the pass rate over its last
    `visits` visits is not `between` the two. A problem with fewer visits is not left out.
    """
    earlier = [visit for visit in visits if visit.epoch < epoch]
    earlier.sort(key=lambda visit: visit.epoch)
    last = earlier[-rules.visits :]
    if len(last) < rules.visits or epoch - last[-1].epoch > rules.rest_epochs:
        return False
    rate = sum(visit.passed for visit in last) / sum(visit.rollouts for visit in last)
    lowest, highest = rules.between
    return not lowest <= rate <= highest


def to_visit(
    rules: PassRate, environment: str, index: DatasetIndex, rollouts: Sequence[Rollout]
) -> Visit | None:
    """The visit that a group is to its problem. None if no rollout of it can be judged."""
    judged = [rollout for rollout in rollouts if not (rollout.failure or rollout.misaligned)]
    if not judged:
        return None
    passed = 0
    for rollout in judged:
        reward = rollout.rewards.get(rules.reward, 0.0) if rules.reward else rollout.reward
        passed += reaches(reward, rules.at_least)
    return Visit(
        environment=environment,
        problem=index.problem,
        epoch=index.epoch,
        passed=passed,
        rollouts=len(judged),
        policy_version=max(rollout.newest_policy_version for rollout in judged),
    )


class ProblemStats:
    """What is known of an env's problems: a fold over their visits, which may come in any order.

    `dataset_index` gives the problem that a number poses, and its epoch.
    """

    def __init__(
        self,
        rules: PassRate,
        environment: str,
        dataset_index: Callable[[int], DatasetIndex | None],
    ) -> None:
        self.rules = rules
        self.environment = environment
        self._dataset_index = dataset_index
        self._by_problem: dict[int, dict[int, Visit]] = {}

    def on_visit(self, visit: Visit) -> None:
        """Count a visit. It takes the slot of an earlier one that no longer counts."""
        slots = self._by_problem.setdefault(visit.problem, {})
        slot = self._slot(visit)
        if slot not in slots or slots[slot].epoch <= visit.epoch:
            slots[slot] = visit

    def is_filtered(self, number: int) -> bool:
        """Whether the problem of this number is left out."""
        index = self._dataset_index(number)
        if index is None:
            return False
        visits = self._by_problem.get(index.problem, {})
        return is_filtered(self.rules, visits.values(), index.epoch)

    def visit_by(self, number: int, rollouts: Sequence[Rollout]) -> Visit | None:
        """The visit that a group is to its problem. It counts only once it is read from the log,
        like those of other replicas.
        """
        index = self._dataset_index(number)
        return index and to_visit(self.rules, self.environment, index, rollouts)

    def key(self, visit: Visit) -> str:
        """The key of its record. Compaction keeps the newest visit of each key."""
        return f"{visit.problem}-{self._slot(visit)}"

    def _slot(self, visit: Visit) -> int:
        """Two visits that follow each other are at most `rest_epochs` + 1 epochs apart, so the last
        `visits` of them have different slots.
        """
        return visit.epoch % (self.rules.visits * (self.rules.rest_epochs + 1))


def make_stats(name: str, settings: AnyEnv, env: BaseEnv) -> ProblemStats | None:
    """Empty statistics of the problems of the env `name`. None if they are not filtered.
    Raises ConfigError if the env poses no problem twice.
    """
    if settings.pass_rate is None:
        return None
    if env.dataset_index(0) is None:
        raise ConfigError(
            f"envs.{name}.pass_rate: {settings.kind or name} poses no problem twice, so there is "
            "nothing to leave out; it takes an env with a file of problems, or with a method "
            "`dataset_index`"
        )
    return ProblemStats(settings.pass_rate, name, env.dataset_index)
