"""vLLM's API server, where each request that states no seed has one: server.py FLAG...

Runs inside vLLM's own interpreter. The models are noise, so an answer is what the sampler draws. With a
seed of its own a request gets the same answer in both arms, whatever was asked before it.
"""

import functools
import runpy

from vllm import SamplingParams

SEED = 0


def seeded(make):
    @functools.wraps(make)
    def from_optional(*args, seed=None, **rest):
        return make(*args, seed=SEED if seed is None else seed, **rest)

    return from_optional


if __name__ == "__main__":  # the engine's own process imports this file, and is no server
    SamplingParams.from_optional = staticmethod(seeded(SamplingParams.from_optional))
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
