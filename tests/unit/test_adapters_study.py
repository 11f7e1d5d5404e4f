"""The study of adapter placement runs, in simulated time, and tells its arms apart."""

import pytest

from loadtest import adapters_virtual as site
from loadtest.outcomes import End


@pytest.mark.parametrize("arm", site.ARMS)
def test_every_request_of_a_small_mix_gets_its_reply_from_an_engine_that_has_its_adapter(arm):
    shots = site.mix(seconds=3.0, rate_per_s=4.0, skew=1.0, seed=1)
    outcomes, loads = site.run(shots, arm, seed=1, head_s=0.0)
    assert len(outcomes) == len(shots) > 5
    assert {outcome.end for outcome in outcomes} == {End.COMPLETE}
    assert {outcome.place for outcome in outcomes} <= set(range(site.BACKENDS))
    names = {shot.adapter for shot in shots}
    # The gateway has loaded beforehand what fits; the others load what is asked for.
    assert loads <= len(names) if arm == "gateway" else loads > 0


def test_the_gateway_refuses_nobody_who_waits_for_an_adapter_that_moves():
    shots = site.mix(seconds=30.0, rate_per_s=6.0, skew=0.8, seed=2)
    outcomes, _ = site.run(shots, "gateway", seed=2, head_s=0.0)
    assert {outcome.end for outcome in outcomes} == {End.COMPLETE}
