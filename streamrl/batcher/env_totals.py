"""EnvTotals: the tokens that wait of each env, the tokens that the next batch owes each share, and
whether an attempt to build the batch can succeed.
"""

from __future__ import annotations

from streamrl.batcher.demand import furthest_batch
from streamrl.batcher.selection import (
    REMAINDER,
    Candidate,
    Selection,
    quotas,
    select,
    shortage,
    tokens_owed,
)
from streamrl.batcher.state import BatcherConfig, BatcherState, deficit_under, fractions_at


class EnvTotals:
    """The tokens of each env and share, kept up to date within a step.

    They are needed after every group, for every env of the run, and most groups change one of them.
    An attempt to build a batch is expensive, so it is made only if the totals do not exclude that
    it succeeds.
    """

    def __init__(self, config: BatcherConfig, state: BatcherState) -> None:
        self._config = config
        self._state = state
        self._tokens_since_attempt = 0
        self.refresh()

    def refresh(self) -> None:
        """Count again. This is needed when a version is announced, and when groups have been taken
        out of their queues.
        """
        state = self._state
        # In the order of the run file: it decides where no other rule decides between two envs. The
        # order in which their first groups came would be chance.
        self.supply = {
            env: state.queues[env].usable_tokens if env in state.queues else 0
            for env in self._config.fractions
        }
        fractions = fractions_at(self._config, state, state.next_batch)
        deficit = deficit_under(self._config, state, fractions)
        self.owed = tokens_owed(fractions, deficit, self._config.total_token_budget)
        self._deficit = sum(state.deficit.values())
        self._retry_after_tokens = dict[str, int]()

    def on_group(self, env: str, tokens: int) -> None:
        """A group with that many tokens has come."""
        self._retry_after_tokens.pop(env, None)
        self._tokens_since_attempt += tokens

    def attempt(self) -> Selection | None:
        """Select the groups of the next batch. None if it is certain without an attempt that some
        share is short (`lacking`).
        """
        if self.is_clearly_short or self.shortage() or self.retry_is_hopeless:
            return None
        selection = self.select()
        self.on_attempt(selection)
        return selection

    def on_attempt(self, selection: Selection) -> None:
        """Note the result of an attempt."""
        self._retry_after_tokens = selection.retry_after_tokens
        self._tokens_since_attempt = 0

    @property
    def is_clearly_short(self) -> bool:
        """Whether the envs have so much less than a batch that some share surely lacks a token."""
        rounding = len(self._config.fractions) + 2
        needed = self._config.total_token_budget + self._deficit
        return sum(self.supply.values()) + rounding < needed

    @property
    def retry_is_hopeless(self) -> bool:
        """Whether the share that was short in the last attempt would be short again
        (`selection.select`). Of several such shares, the first one allows for most tokens of
        others.
        """
        first = next(iter(self._retry_after_tokens.values()), -1)
        return first >= self._tokens_since_attempt

    def lacking(self) -> dict[str, int]:
        """The tokens that each share lacks in the next batch; empty if it can be built."""
        return self.shortage() or self.select().short

    def shortage(self) -> dict[str, int]:
        """The tokens that each share lacks while all envs together have less than a batch; empty
        otherwise.
        """
        config = self._config
        return shortage(self.supply, self.owed, config.total_token_budget, config.spill)

    def select(self) -> Selection:
        """The groups that the next batch would have, or what it lacks."""
        config = self._config
        queues = self._state.queues
        first_asked = {
            env: queues[env].first_asked(self.asked_tokens(env))
            for env, tokens in self.supply.items()
            if tokens
        }

        def offer(env: str, number: int) -> Candidate | None:
            if env not in first_asked:
                return None
            return queues[env].candidate(env, number, first_asked[env])

        return select(self.supply, offer, self.owed, config.total_token_budget, config.spill)

    def asked_tokens(self, env: str) -> float:
        """The most tokens that the batches from the next one up to the furthest for which work may
        begin now can take of the env.
        """
        config = self._config
        state = self._state
        quota = quotas(fractions_at(config, state, state.next_batch))
        share = 1.0 if config.spill else quota.get(env, 0.0) + quota[REMAINDER]
        batches = max(furthest_batch(config, state, env) - state.next_batch + 1, 1)
        owed = self.owed.get(env, 0.0) - quota.get(env, 0.0) * config.total_token_budget
        return batches * share * config.total_token_budget + max(owed, 0.0)
