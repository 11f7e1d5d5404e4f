"""One simulated vLLM with any of its settings: python -m loadtest.tight '{"port": 8001, "num_blocks": 2048}'."""

import json
import sys

from gateway.sim.config import SimConfig
from gateway.sim.server import run

if __name__ == "__main__":
    run(SimConfig(**json.loads(sys.argv[1])))
