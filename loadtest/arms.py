"""What the overload study compares: each system's settings, and how it is started and ended."""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from ruamel.yaml import YAML

from loadtest.harness import BIN, GATEWAY_CORE, LOAD_CORE, free_port, process, wait_for
from loadtest.openloop import Door

Address = tuple[str, int]

# The pool's settings of each gateway arm; `{..._ms}` are the objectives of the study. `gateway` is what
# is shipped: nobody tunes it before the first overload, and it is not told the objectives.
POOL: Final[dict[str, str]] = {
    "gateway": "",
    "tuned": """\
    queue: {{max_requests: 256, max_wait: {wait_ms}ms}}
    slo: {{ttft: {ttft_ms}ms, itl: {itl_ms}ms}}
""",
    "gateway-off": """\
    admission: off
""",
}
# How long a request may wait at the gate, where a setting says so: half of what is seen at half load
# (p99), for the sum is to stay below twice.
WAITS_S: Final = {"tuned": 0.15}
ARMS: Final = (*POOL, "direct", "vllm-router")
TITLES: Final = {
    "gateway": "this gateway as shipped, no setting touched",
    "tuned": "this gateway, told the study's objectives; requests wait at most 0.15 s at the gate",
    "gateway-off": "this gateway, admission off",
    "direct": "no gateway, clients pick the backend with the fewest of their requests",
    "vllm-router": "vllm-router as shipped",
}
PRIORITIES: Final = {"interactive": 10}  # of keys by tenant; the others have 0

# Overload is real and the machine is not busy. The cache of each holds about twenty long requests;
# then running requests grow into what is left and preempt each other.
SIM: Final[dict[str, Any]] = {
    "max_num_seqs": 64,
    "num_blocks": 4096,
    "block_size": 16,
    "max_model_len": 8192,
    "decode_step_s": 0.020,
    "prefill_tokens_per_s": 40_000.0,
}


@dataclass(frozen=True)
class Backends:
    """vLLM servers, simulated or real: their addresses, and the processes when they are ours."""

    addresses: list[Address]
    model: str
    pids: list[int]

    @property
    def urls(self) -> list[str]:
        """Return their base URLs."""
        return [f"http://{host}:{port}" for host, port in self.addresses]


@dataclass(frozen=True)
class Entrance:
    """A running arm: the door for the client, and the processes between it and the backends."""

    door: Door
    pids: list[int]
    wait_s: float | None = 0.0  # how long a request may wait at the gate; None: it decides itself


@contextlib.contextmanager
def simulated(count: int, settings: dict[str, Any]) -> Iterator[Backends]:
    """Run simulated vLLM servers, each a process of its own on the load's core."""
    with contextlib.ExitStack() as stack:
        ports = [free_port() for _ in range(count)]
        pids = [
            stack.enter_context(
                process(
                    [
                        *(sys.executable, "-m", "loadtest.tight"),
                        json.dumps(SIM | settings | {"model": "m", "port": port}),
                    ],
                    LOAD_CORE,
                    cwd=str(pathlib.Path(__file__).parents[1]),
                )
            )
            for port in ports
        ]
        for port in ports:
            wait_for(port, "/health")
        yield Backends([("127.0.0.1", port) for port in ports], "m", pids)


def given(urls: Sequence[str], model: str) -> Backends:
    """Use servers that run already (plain HTTP, no key)."""
    parts = [urlsplit(url) for url in urls]
    return Backends([(each.hostname or "", each.port or 80) for each in parts], model, [])


@contextlib.contextmanager
def entrance(
    arm: str, backends: Backends, keys: KeyFolder, objectives: dict[str, int], router: list[str]
) -> Iterator[Entrance]:
    """Start what stands before the backends in one arm. `router`: the command of vllm-router."""
    if arm == "direct":
        yield Entrance(Door(list(backends.addresses), backends.model), [])
        return
    port, admin = free_port(), free_port()
    if arm == "vllm-router":
        command = [
            *(router[0], "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
            *("--prometheus-port", str(admin), *router[1:], "--worker-urls", *backends.urls),
        ]
        ready = (port, "/health")
    else:
        config = keys.folder / f"{arm}.yaml"
        settings = POOL[arm].format(wait_ms=round(1000 * WAITS_S.get(arm, 0.0)), **objectives)
        config.write_text(keys.head(port, admin) + _pool(backends, settings))
        command = [str(BIN / "vllm-gateway"), "serve", "-c", str(config)]
        ready = (port, "/readyz")
    log = str(keys.folder / f"{arm}.log")
    with process(command, GATEWAY_CORE, log=log) as pid:
        try:
            wait_for(*ready)
        except OSError:
            raise SystemExit(f"{arm} did not start:\n" + pathlib.Path(log).read_text()) from None
        door = Door([("127.0.0.1", port)], backends.model, keys.keys)
        decides = arm == "gateway"
        yield Entrance(door, [pid], None if decides else WAITS_S.get(arm, 0.0))


class KeyFolder:
    """A folder with a keys file, and one key for each tenant."""

    def __init__(self, folder: pathlib.Path, tenants: Sequence[str]) -> None:
        self.folder = folder
        config = folder / "keys-only.yaml"
        config.write_text(
            self.head(free_port(), free_port()) + _pool(Backends([("127.0.0.1", 1)], "m", []), "")
        )
        self.keys = {tenant: self._create(config, tenant) for tenant in tenants}
        yaml, path = YAML(), folder / "keys.yaml"
        records = yaml.load(path)
        for record in records["keys"]:
            if record["name"] in PRIORITIES:
                record["priority"] = PRIORITIES[record["name"]]
        yaml.dump(records, path)

    def head(self, port: int, admin: int) -> str:
        """Return the part of a settings file that is no pool."""
        return (
            f"version: 1\nlisten: 127.0.0.1:{port}\nadmin: {{listen: 127.0.0.1:{admin}}}\n"
            "keys: {file: keys.yaml}\n"
        )

    def _create(self, config: pathlib.Path, tenant: str) -> str:
        made = subprocess.run(
            [
                str(BIN / "vllm-gateway"),
                *("keys", "create", tenant, "-c", str(config), "-o", "json"),
            ],
            check=True,
            capture_output=True,
        )
        return str(json.loads(made.stdout)["key"])


def _pool(backends: Backends, settings: str) -> str:
    urls = "".join(f"      - {url}\n" for url in backends.urls)
    return f"pools:\n  {backends.model}:\n    backends:\n{urls}{settings}"
