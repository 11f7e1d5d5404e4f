"""Two gateways on a real Redis judge a canary together: one verdict, over what both saw, and both follow it."""

import itertools
import json

import pytest

from gateway.rollout.verdict import Finding
from tests.redisserver import redis_server
from tests.stories.support import FAST, gateway, story

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


def traffic(first, second):
    backends = [{"url": first, "revision": "v1"}, {"url": second, "revision": "v2"}]
    canary = {"revision": "v2", "weight": 0.5, "automatic": True}
    return "pools: " + json.dumps({"m": {"canary": canary, "backends": backends}})


def canary(world):
    return world.process.rollouts.get("m")


@story
async def test_one_of_two_gateways_gives_the_verdict_over_what_both_saw():
    with redis_server() as redis:
        extra = f"redis: {redis.url}\nstate: state"
        async with (
            gateway(FAST, FAST, pools=traffic("<0>", "<1>"), extra=extra) as one,
            gateway(FAST, pools=traffic(one.sims[0].url, one.sims[1].url), extra=extra) as two,
        ):
            one.sims[1].inject("http_500:422")
            both = one, two
            await one.until(lambda: any(each.process.rollouts.judges for each in both), 20)
            numbers = itertools.count()

            def wants(each, side):
                """Whether a side has too few requests; a verdict may come as soon as both together saw enough."""
                seen = getattr(canary(each).own, side).requests
                return seen < 15 and canary(each).finding is Finding.OPEN

            for each in both:  # one alone does not see enough
                served = ""
                while wants(each, "trial"):
                    text = f"conversation {next(numbers)}"
                    if (await each.chat(text, max_tokens=1)).status_code == 200:
                        served = text
                    each.process.ledger.post()
                # As chance would have it, fewer went there.
                while wants(each, "stable"):
                    text = served or f"conversation {next(numbers)}"
                    await each.chat(text, max_tokens=1)
                    each.process.ledger.post()
            await one.until(lambda: all(canary(each).carried_out for each in both), 20)
            assert {canary(each).finding.value for each in both} == {"worse"}
            assert all(canary(each).own.trial.requests < 20 for each in both)
            events = [
                event.label
                for each in both
                for event in each.process.supervisor.events.newest()
                if event.kind.value == "canary"
            ]
            assert events == ["worse"]
            assert sum(each.process.rollouts.judges for each in both) == 1
            for each in both:
                saved = json.loads((each.path.parent / "state/rollouts.json").read_text())
                assert saved["m"][1] == "worse"
                replies = [await each.chat(f"later {n}", max_tokens=1) for n in range(12)]
                assert {reply.headers["x-gateway-revision"] for reply in replies} == {"v1"}
