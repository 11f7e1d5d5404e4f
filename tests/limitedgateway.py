"""What a gateway limits and counts, on a Redis: the test says when it takes its turns."""

import asyncio
import contextlib

from gateway.core.aio import SystemClock
from gateway.core.asked import Caller
from gateway.core.limits import Price, Taken
from gateway.sharing import limiter_of
from gateway.store.onredis import redis_store
from gateway.store.shared import StoreUnavailable
from gateway.usage.accounts import Accounts
from tests.limitercases import amounts
from tests.unit.test_usage import record


class LimitedGateway:
    """`state` is its folder, `replicas` how many share the Redis."""

    def __init__(self, url, state, replicas=1, store=redis_store):
        clock = SystemClock()
        self.store = store(url, clock)
        self.accounts = Accounts(clock, self.store.link, state, 10**6)
        self.limiter = limiter_of(clock, self.store.link, lambda: replicas, self.accounts, None)
        # Tokens that Redis may have counted, though the limiter did not hear of it; of these, such as it
        # answered too late for: what was taken there stays taken if that is never heard, and the ledger
        # tells what was used.
        self.doubtful = self.late = 0

    async def answers(self, plan, tokens, times=1):
        """Answer requests that use so many tokens; returns how many fitted."""
        fitted, costs = 0, amounts(tokens, money=tokens / 1e6)
        for _ in range(times):
            taken = await self.limiter.take(plan, costs)
            if isinstance(taken, Taken):
                if not taken.shared:
                    self.doubtful += tokens
                    self.late += 0 if self.store.link.trouble else tokens
                self.limiter.settle(taken, costs)
                made = record(
                    tokens=(tokens, 0), received_at=SystemClock.now(), price=Price(1, 1, 2)
                )
                owner = plan.stores[0].partition("{t:")[2].partition("}")[0]
                made.caller = Caller(plan.key_id, plan.key_id, owner)
                self.accounts.posted([made])
                fitted += 1
        return fitted

    async def used(self, plan):
        """Return what is used of each rule, as Redis says; None: it does not answer."""
        taken = await self.limiter.take(plan, amounts())
        self.limiter.settle(taken, taken.costs)
        return taken.used if taken.shared else None

    async def finds(self):
        """Ask Redis until it answers, as the heartbeat does."""
        while True:
            with contextlib.suppress(StoreUnavailable):
                return await self.store.holds()
            await asyncio.sleep(0.05)

    async def ends(self):
        await self.accounts.close()
        await self.store.close()
