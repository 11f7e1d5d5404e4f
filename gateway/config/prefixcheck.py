"""Check that a pool with `prefix: precise` has all that it needs. Pure, as `config.check`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from gateway.config.findings import KeyPath, Remark, warning
from gateway.config.kvevents import flag_of
from gateway.config.models import BackendConfig, Config, PoolConfig
from gateway.config.parameters import PrefixRouting


def check_prefix(config: Config) -> Iterator[Remark]:
    """Yield what is wrong or doubtful in the `prefix` settings of pools."""
    for name, pool in config.pools.items():
        if pool.prefix is PrefixRouting.PRECISE:
            yield from _precise(("pools", name), pool)


def _precise(path: KeyPath, pool: PoolConfig) -> Iterator[Remark]:
    if find_spec("zmq") is None:
        yield Remark(
            (*path, "prefix"),
            "no-zeromq",
            "prefix: precise reads vLLM's KV events over ZeroMQ, which is not installed",
            "pip install 'vllm-gateway[kvevents]', or write `prefix: approximate`",
        )
    if pool.tokenizer is None and any(each.launch is None for each in pool.backends):
        yield warning(
            (*path, "prefix"),
            "no-tokenizer",
            "prefix: precise compares token ids, and without `tokenizer` only prompts that clients send as"
            " ids have them here; all others are routed as with `approximate`",
            "set `tokenizer` to the folder of the model",
        )
    for place, backend in enumerate(pool.backends):
        if backend.launch is not None and backend.kv_events is None:
            yield from _launched((*path, "backends", place, "launch"), backend)


def _launched(path: KeyPath, backend: BackendConfig) -> Iterator[Remark]:
    assert backend.launch is not None
    found = flag_of(backend.launch)
    if found is None or found[0].get("enable_kv_cache_events") is not True:
        yield warning(
            path,
            "no-kv-events",
            f"{backend.name} publishes no KV events, so its prefix cache is guessed",
            """add kv-events-config: '{"enable_kv_cache_events": true, "replay_endpoint": "tcp://*:5558"}'"""
            " to its `args`",
        )
        return
    endpoint = str(found[0].get("endpoint", "tcp://*"))
    if endpoint.startswith("tcp://") and "*" not in endpoint and "::" not in endpoint:
        yield warning(
            path,
            "kv-events-endpoint",
            f"vLLM connects to {endpoint} instead of listening there, so nobody can subscribe",
            "write tcp://*:PORT, or ipc:///PATH where nobody else may read it",
        )
