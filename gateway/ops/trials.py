"""What is told of a revision on trial."""

from __future__ import annotations

from typing import TypedDict

from gateway.rollout.rollouts import Rollout


class TrialOverview(TypedDict):
    """One revision on trial. Requests count where they were answered."""

    revision: str
    finding: str  # rollout.verdict.Finding
    automatic: bool
    carried_out: bool  # what was found is in force
    requests: int
    failed: int
    requests_of_others: int
    failed_of_others: int
    sentence: str


def trial_told(rollout: Rollout | None) -> TrialOverview | None:
    """Return the trial of a pool as `status` shows it."""
    if rollout is None:
        return None
    return TrialOverview(
        revision=rollout.config.revision,
        finding=rollout.finding.value,
        automatic=rollout.config.automatic,
        carried_out=rollout.carried_out,
        requests=rollout.trial.requests,
        failed=rollout.trial.failed,
        requests_of_others=rollout.stable.requests,
        failed_of_others=rollout.stable.failed,
        sentence=rollout.told(),
    )
