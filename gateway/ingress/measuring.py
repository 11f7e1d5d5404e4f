"""What a request needs, judged and counted: the last step before it asks its pool for a backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Final

from gateway.admission.gate import Gate
from gateway.core.aio import beside
from gateway.core.types import Ask, Demand, Phase, RequestRecord
from gateway.counting.context import bound, settle, unsettled
from gateway.ingress.settings import Settings
from gateway.pools.table import PoolTable
from gateway.prefix.beginnings import Beginnings

UNMEASURED: Final = Demand(0, exact=False)  # of an ask of which nothing is known yet


@dataclass(frozen=True, slots=True)
class Measuring:
    """Notes in an ask, and in its record, what it needs: `at_once`, else `counted`."""

    table: PoolTable
    gate: Gate
    beginnings: Beginnings = field(default_factory=Beginnings)

    def at_once(self, settings: Settings, record: RequestRecord, ask: Ask) -> bool:
        """Whether its size tells what it needs; else its prompt must be counted.

        Raises:
            RequestError: its pool takes no such call, or it does not fit (400).
        """
        call, route, caller = ask.call, ask.route, ask.caller
        settings.policies.judge(call, route.pool, caller.parameters)
        policy = settings.on_overflow[route.pool]
        demand = bound(call, route=route, caller=caller, policy=policy)
        if demand is None:
            return False
        self._note(record, ask, demand)
        return True

    async def counted(self, settings: Settings, record: RequestRecord, ask: Ask) -> None:
        """Count the prompt exactly where its size alone does not tell whether it fits.

        Raises:
            RequestError: it does not fit (400).
        Cancel: nothing is held.
        """
        call, route, caller = ask.call, ask.route, ask.caller
        backends = self.table.backends(route.pool)
        serving = [each for each in backends if each.phase is Phase.READY]
        serving = serving or [each for each in backends if each.phase is Phase.DEGRADED]
        tokens = await settings.counters.count(call, route, serving)
        policy = settings.on_overflow[route.pool]
        if tokens is not None:
            demand = settle(call, tokens, route=route, caller=caller, policy=policy)
        elif not serving:  # the gate says so, and when to come again
            demand = Demand(len(call.body), exact=False, max_new_tokens=call.max_new_tokens)
        else:
            judge = partial(unsettled, call, route=route, caller=caller, policy=policy)
            demand = judge() if call.places is None else await beside(judge)
        self._note(record, ask, demand)

    def _note(self, record: RequestRecord, ask: Ask, demand: Demand) -> None:
        record.demand = ask.demand = demand
        window = ask.route.window_tokens
        record.need = ask.need = self.gate.need(ask.call, demand, ask.caller, window)
        ask.prefix = self.beginnings.of(ask, self.table.backends(ask.route.pool))
        ask.top_priority = self.gate.top_priority
        ask.returned, ask.fallback = record.client_retry > 0, record.fallback
