"""Send long prompts one after the other, and tell whether a backend leaves `ready` while one is read.

    python -m loadtest.longprompt --url URL --admin URL --key KEY --model NAME [--tokens 60000] [--times 3]

Meant for a slow engine that reads in small parts, so that a prompt takes longer than `health.progress`:

    taskset -c 0 python -m vllm.entrypoints.openai.api_server --max-model-len 98304 --max-num-batched-tokens 32 ...

Every prompt differs from the others, so none is found in the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import urllib.request

_LOOKS_S = 0.5
_PATIENCE_S = 1800.0


def watch(admin: str, over: threading.Event, seen: list[str]) -> None:
    """Note each change of the backends' phases until it is over."""
    while not over.wait(_LOOKS_S):
        with urllib.request.urlopen(f"{admin}/admin/v1/overview", timeout=10) as reply:
            pools = json.load(reply)["pools"]
        backends = [each for pool in pools for each in pool["backends"]]
        shown = ", ".join(f"{each['name']} {each['phase']} ({each['reason']})" for each in backends)
        if not seen or seen[-1] != shown:
            print(f"{time.strftime('%X')} {shown}", flush=True)
            seen.append(shown)


def ask(args: argparse.Namespace, number: int) -> float:
    """Return the seconds until the first token of one prompt."""
    step = number + int(time.time()) % 97 + 3
    prompt = [7 + place * step % 1000 for place in range(args.tokens)]
    body = {"model": args.model, "prompt": prompt, "max_tokens": 2, "stream": True}
    headers = {"content-type": "application/json", "authorization": f"Bearer {args.key}"}
    request = urllib.request.Request(
        f"{args.url}/v1/completions", json.dumps(body).encode(), headers
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=_PATIENCE_S) as reply:
        first = next(line for line in reply if line.startswith(b"data: {"))
        if b'"error"' in first:
            raise SystemExit(first.decode())
        first_s = time.monotonic() - began
        reply.read()
    return first_s


def main() -> None:
    """Send the prompts; the exit status is 1 if the backends changed meanwhile."""
    told = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name in ("--url", "--admin", "--key", "--model"):
        told.add_argument(name, required=True)
    told.add_argument("--tokens", type=int, default=60_000)
    told.add_argument("--times", type=int, default=3)
    args = told.parse_args()
    over, seen = threading.Event(), list[str]()
    watching = threading.Thread(target=watch, args=(args.admin, over, seen))
    watching.start()
    try:
        for number in range(args.times):
            print(f"{args.tokens} tokens: first token after {ask(args, number):.1f} s", flush=True)
    finally:
        over.set()
        watching.join()
    raise SystemExit(len(seen) != 1)


if __name__ == "__main__":
    main()
