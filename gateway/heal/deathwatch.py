"""Notice at once when a process ends that a launched server cannot do without.

vLLM is several processes. When its engine or a worker is killed, the API process may take seconds
to notice, and requests go there meanwhile. A process's handle (pidfd_open(2)) tells in the moment.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final

from gateway.core.types import Phase
from gateway.heal.charge import Charge, Timing
from gateway.heal.lookout import Lookout, runs
from gateway.launch import proc
from gateway.launch.process import ProcessLauncher
from gateway.pools.health import Tending
from gateway.pools.table import PoolTable

log = logging.getLogger("gateway.supervisor")

_REASON: Final = "exited"


@dataclass(slots=True)
class DeathWatch:
    """Watches the processes of launched servers."""

    table: PoolTable
    lookout: Lookout
    timing: Timing = Timing()

    async def keep(self, charge: Charge, launcher: ProcessLauncher) -> None:
        """Watch the server that runs; returns once it has gone, or is being restarted.

        A backend that lost a process is out of rotation in the same moment. If it lives on and
        still gives a token (another made up for the one that ended), it serves again.

        Errors: none; without handles the probes have to notice. Cancel: nothing is held.
        """
        of = runs(charge)
        while of is not None and runs(charge) == of and not charge.gone:
            try:
                ended = await proc.first_end(await launcher.vital())
            except OSError as error:
                log.warning("%s: cannot watch its processes: %s", charge.id, error.strerror)
                return
            if ended is None or charge.busy or charge.gone or runs(charge) != of:
                return
            why = f"its process {ended} has ended"
            out = Tending(Phase.DOWN, _REASON, why)
            self.table.tend(charge.id, out)
            await asyncio.sleep(self.timing.last_words_s)  # most end as a whole, and say why
            if charge.backend.health.tended is out and await self.lookout.prove(charge, why):
                self.table.tend(charge.id, None)
