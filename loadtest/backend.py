"""One simulated vLLM with a pace of one's choosing: backend.py --port 8001 --decode-step 0.005."""

import argparse

from gateway.sim.config import SimConfig
from gateway.sim.server import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--decode-step", type=float, default=0.01, help="seconds; 0: as fast as it goes"
    )
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=8192)
    args = parser.parse_args()
    run(
        SimConfig(
            model="m",
            port=args.port,
            speed=1.0 if args.decode_step else 0.0,
            decode_step_s=args.decode_step or 0.01,
            max_num_seqs=args.max_num_seqs,
            max_model_len=args.max_model_len,
            num_blocks=max(4096, args.max_num_seqs * args.max_model_len // 64),
        ),
        [],
    )
