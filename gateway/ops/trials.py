"""The canary of a pool, for the overview and for the explanation of one request."""

from __future__ import annotations

from typing_extensions import TypedDict

from gateway.rollout.rollouts import Rollout


class TrialOverview(TypedDict):
    """One canary. A request counts for the side that answered it."""

    revision: str
    finding: str  # rollout.verdict.Finding
    automatic: bool
    carried_out: bool  # the verdict is in force
    requests: int
    failed: int
    requests_of_others: int
    failed_of_others: int
    sentence: str


def trial_told(rollout: Rollout | None) -> TrialOverview | None:
    """Return the canary of a pool as `status` shows it."""
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


def sides_told(pool: str | None, rollout: Rollout | None) -> str | None:
    """Return which requests go to which side of a pool's canary, and what is known of both; None: it has none."""
    if rollout is None:
        return None
    config, share, told = rollout.config, rollout.config.weight, rollout.told()
    told = told[0].upper() + told[1:]
    if rollout.carried_out:  # the shares are no longer in force
        return f"Canary of {pool}: {told}"
    if share is not None:
        part = f"{share:.4g} of the conversations; the other backends get {1 - share:.4g}"
    elif config.keys:
        part = f"the requests of {len(config.keys)} keys; the other backends get the rest"
    else:
        part = "requests that name it in `x-gateway-revision`; the other backends get the rest"
    return f"Canary of {pool}: {config.revision} gets {part}. {told}"
