"""Where the tokens went that the policy wrote: each ends in exactly one of trained, stale, filtered, failed, evaluation, or is in flight.

    generated = trained + stale + filtered + failed + evaluation + in flight

Observations are left out, which the ledger's tokens count. A token shares the fate of its group, also where the correction gives it no weight. What a
session wrote and no row holds has failed; what was written for a group that was taken away shares that group's fate. Tokens that a process had
written and not reported when it was killed are known to nobody, and in no number here. What was in flight when a run ended in order stays so.
"""

from __future__ import annotations

from collections import Counter

from streamrl.protocol.groups import WASTES, ReplayStats

TRAINED, FAILED, IN_FLIGHT = "trained", "failed", "in_flight"


def fate_of_reason(reason: str) -> str:
    """The fate of tokens whose group, attempt or session ended untrained.

    >>> fate_of_reason("doomed"), fate_of_reason("zero_variance"), fate_of_reason("superseded")
    ('stale', 'filtered', 'failed')
    """
    return WASTES.get(reason, FAILED)


class TokenFates:
    """Totals since the run began."""

    def __init__(self) -> None:
        self.generated = 0
        self.in_flight = 0
        self.rolled_back = 0  # ever taken out of trained
        self.fates: Counter[str] = Counter()

    def arrive(self, tokens: int) -> None:
        """In the rows of a living group."""
        self.generated += tokens
        self.in_flight += tokens

    def spend(self, tokens: int, reason: str) -> None:
        """In no row, or in rows that were refused."""
        self.arrive(tokens)
        self.waste(tokens, reason)

    def train(self, tokens: int) -> None:
        self.in_flight -= tokens
        self.fates[TRAINED] += tokens

    def waste(self, tokens: int, reason: str) -> None:
        """They were in flight."""
        fate = fate_of_reason(reason)
        if fate != IN_FLIGHT:
            self.in_flight -= tokens
            self.fates[fate] += tokens

    def roll_back(self, tokens: int, kept: bool) -> None:
        """Their update is lost; their rows are ``kept``, or lost too."""
        self.rolled_back += tokens
        self.fates[TRAINED] -= tokens
        if kept:
            self.in_flight += tokens
        else:
            self.fates[FAILED] += tokens

    def lose(self) -> None:
        """All that is in flight went with its store."""
        self.waste(self.in_flight, FAILED)

    def fill(self, stats: ReplayStats) -> None:
        stats.generated_tokens, stats.tokens_in_flight, stats.generated_tokens_rolled_back = self.generated, self.in_flight, self.rolled_back
        stats.token_fates = dict(self.fates)

    def load(self, stats: ReplayStats) -> None:
        self.generated, self.in_flight, self.rolled_back = stats.generated_tokens, stats.tokens_in_flight, stats.generated_tokens_rolled_back
        self.fates = Counter(stats.token_fates)
