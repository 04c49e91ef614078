"""EnvTotals: what there is of each env, what the next batch owes each share, and whether it is
worth trying to build the batch.
"""

from __future__ import annotations

from streamrl.batcher.selection import Selection, select, shortage, tokens_owed
from streamrl.batcher.state import BatcherConfig, BatcherState, deficit_under, fractions_at


class EnvTotals:
    """What there is of each env and what the next batch owes each share.

    Both are asked for at every group, of every env of the run, and seldom change. The totals also
    know when it is of no use to try to build the batch again.
    """

    def __init__(self, config: BatcherConfig, state: BatcherState) -> None:
        self._config = config
        self._state = state
        self._tokens_since_attempt = 0
        self.refresh()

    def refresh(self) -> None:
        """Count again. Needed when a version is announced, or groups have left."""
        state = self._state
        # In the order of the run file: it decides between envs of which no other rule does, and
        # which env's group came first is chance.
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

    def on_attempt(self, selection: Selection) -> None:
        """The batch was tried to be built, with this result."""
        self._retry_after_tokens = selection.retry_after_tokens
        self._tokens_since_attempt = 0

    @property
    def retry_is_hopeless(self) -> bool:
        """Would the same share as in the last attempt come up short again (`selection.select`)? Of
        several such shares, the first allows for most tokens of others.
        """
        first = next(iter(self._retry_after_tokens.values()), -1)
        return first >= self._tokens_since_attempt

    @property
    def is_clearly_short(self) -> bool:
        """Is there so much less than a batch that some share surely lacks a token?"""
        rounding = len(self._config.fractions) + 2
        needed = self._config.total_token_budget + self._deficit
        return sum(self.supply.values()) + rounding < needed

    def shortage(self) -> dict[str, int]:
        config = self._config
        return shortage(self.supply, self.owed, config.total_token_budget, config.spill)

    def select(self) -> Selection:
        config = self._config
        queues = self._state.queues
        return select(
            self.supply,
            lambda env, number: queues[env].candidate(env, number) if env in queues else None,
            self.owed,
            config.total_token_budget,
            config.spill,
        )
