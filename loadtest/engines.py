"""The engines that the overload study simulates: they differ by ten times in speed, and more in cache.

The gateway is not told which one it has; what counts as a good reply is. It follows from what the
engine can do when it is idle:

    first token   within 2.5 s, or within ten times the quiet one of the longest prompt where that is more
    token gap     80 ms at most, or twice the quiet one where that is more
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from gateway.sim.config import SimConfig
from loadtest.arms import SIM
from loadtest.arrivals import PROFILES, Profile
from loadtest.outcomes import Slo

_TTFT_S: Final = 2.5
_TTFT_TIMES: Final = 10.0
_GAP_S: Final = 0.08
_GAP_TIMES: Final = 2.0


@dataclass(frozen=True)
class Bench:
    """One kind of engine, two of which serve, and the load that suits it. Times are seconds.

    `capacity_per_s` is what `python -m loadtest.simulated --capacity` finds: good replies straight to
    the engines.
    """

    name: str
    settings: dict[str, Any]
    profile: Profile
    capacity_per_s: float
    steps: tuple[int, ...]  # in flight, of the ramp that finds the capacity
    seconds: float  # of arrivals that count
    lead_s: float  # of arrivals before them

    @property
    def config(self) -> SimConfig:
        """The settings of one server."""
        return SimConfig(**self.settings, model="m")

    @property
    def slo(self) -> Slo:
        """What a good reply keeps."""
        config = self.config
        longest = max(kind.prompt_tokens[1] for kind, _ in self.profile.mix)
        reads_s = longest / config.prefill_tokens_per_s
        steps = -(-longest // config.max_batched_tokens)
        quiet_s = reads_s + steps * config.decode_step_s
        return Slo(
            round(max(_TTFT_S, _TTFT_TIMES * quiet_s), 3),
            round(max(_GAP_S, _GAP_TIMES * config.decode_step_s), 3),
        )


BENCHES: Final = {
    each.name: each
    for each in (
        Bench(
            "slow",
            {
                "max_num_seqs": 16,
                "num_blocks": 1600,
                "decode_step_s": 0.060,
                "prefill_tokens_per_s": 4_000.0,
            },
            PROFILES["small"],
            capacity_per_s=7.0,
            steps=(4, 8, 12, 16, 20, 24, 28, 32, 40),
            seconds=90.0,
            lead_s=15.0,
        ),
        Bench(
            "study",
            SIM,
            PROFILES["full"],
            capacity_per_s=25.0,
            steps=(16, 32, 48, 64, 80, 96, 128),
            seconds=20.0,
            lead_s=6.0,
        ),
        Bench(
            "fast",
            {
                "max_num_seqs": 256,
                "num_blocks": 20_000,
                "decode_step_s": 0.006,
                "prefill_tokens_per_s": 200_000.0,
                "max_batched_tokens": 8192,
                "max_model_len": 32_768,
            },
            PROFILES["large"],
            capacity_per_s=46.0,
            steps=(32, 64, 128, 192, 256, 320, 384, 512),
            seconds=15.0,
            lead_s=6.0,
        ),
        # Like a real vLLM with a small model on CPU (`loadtest.real`): its cache is full long before its batch.
        Bench(
            "tight",
            {
                "max_num_seqs": 32,
                "num_blocks": 128,
                "block_size": 32,
                "max_model_len": 2048,
                "decode_step_s": 0.008,
                "prefill_tokens_per_s": 12_000.0,
            },
            PROFILES["tight"],
            capacity_per_s=18.7,
            steps=(8, 16, 24, 32, 40, 48, 56, 64, 80),
            seconds=25.0,
            lead_s=6.0,
        ),
    )
}
