"""Alerts on what the gateway has judged itself: states of backends, and the problems that `status` lists. Pure.

The gateway has waited until it was sure, so these fire at once, with the sentence of `status` as the cause.
"""

from __future__ import annotations

from typing import Final

from gateway.observe.alerts import BACKEND, Alert

_DIAGNOSE: Final = "`vllm-gateway logs POOL/NAME | vllm-gateway diagnose -`"


def _one_of(label: str, values: str) -> str:
    """Return the matcher of series in which a label has one of some values: `a|b`."""
    return f'{label}=~"{values}"' if "|" in values else f'{label}="{values}"'


def _in_state(states: str) -> str:
    """Return the expression that a backend is in one of some states (`ops.states.BackendState`)."""
    # `lasts` counts on while it goes from one of the states to another.
    return f"max without (state) (gateway_backend_state{{{_one_of('state', states)}}}) == 1"


def _has_problem(kinds: str) -> str:
    """Return the expression that there is a problem of some kinds (`ops.problems.ProblemKind`)."""
    return f"gateway_problem{{{_one_of('kind', kinds)}}} == 1"


STATES: Final = (
    Alert(
        name="BackendCrashLoops",
        expr=_in_state("crash-looping|suspended"),
        summary=f"Backend {BACKEND} crashes again and again",
        means="It ended several times within minutes. `suspended`: the gateway leaves it alone until an operator acts.",
        look=f"{_DIAGNOSE} names the cause, the line that proves it, and the flag to change.",
        act="Change the flag or the machine, reload, then `vllm-gateway undrain POOL/NAME`.",
    ),
    Alert(
        name="BackendFailed",
        expr=_in_state("failed|down"),
        summary=f"Backend {BACKEND} does not run: its process ended, or its health checks fail",
        means="Its peers do its work. A launched one is started again by itself, with pauses.",
        look=f"{_DIAGNOSE}; for others vLLM's log where it runs.",
        act="Start it where it runs, if the gateway does not. If it ends again, BackendCrashLoops follows.",
        lasts="10s",
    ),
    Alert(
        name="BackendUnreachable",
        expr=_in_state("unreachable"),
        summary=f"Backend {BACKEND} cannot be reached",
        means="Nothing answers at its address, or what answers is no vLLM that lets the gateway in.",
        look="`curl URL/health` from the gateway's machine; `vllm-gateway status` has the error.",
        act="Start vLLM; mend the address, the firewall or `api_key`; `vllm-gateway check FILE --probe` tries all.",
        lasts="10s",
    ),
    Alert(
        name="BackendFailing",
        expr=_in_state("failing"),
        summary=f"Backend {BACKEND} answers its checks, and its requests fail",
        means="It gets no new requests, or one at a time, until one succeeds.",
        look="`vllm-gateway events`; `gateway_upstream_failures_total` by reason; vLLM's own log.",
        act="Restart it: `vllm-gateway restart POOL/NAME`, or where it runs.",
    ),
    Alert(
        name="BackendStartsLong",
        expr=_in_state("starting|pending|restarting"),
        summary=f"Backend {BACKEND} has been starting for half an hour",
        means="vLLM loads weights, compiles, or waits for something that does not come.",
        look="`vllm-gateway logs POOL/NAME` shows how far it is.",
        act="A slow disk or download needs patience (`supervision.patience`); a hang needs a restart.",
        lasts="30m",
    ),
)

PROBLEMS: Final = (
    Alert(
        name="BackendFrozen",
        expr=_has_problem("frozen"),
        summary="The engine of {{ $labels.subject }} makes no progress, though its server answers",
        means="Requests wait there, and nothing comes. A deadlock, a GPU fault, or a stopped process. New requests go"
        " elsewhere; when test requests get no token either, it is taken out of its pool.",
        look="`vllm-gateway events` has the evidence; `nvidia-smi` and `dmesg` on its machine tell of GPU faults (Xid).",
        act="With `launch` or `restart` it is restarted by itself, unless that is on hold. Else restart vLLM there.",
    ),
    Alert(
        name="ModelFails",
        expr=_has_problem("requests_fail|model_fails"),
        summary="Most requests for {{ $labels.subject }} fail",
        means="Of its last requests more than half failed. Others of the pool may be in order.",
        look="`vllm-gateway status` has the numbers and the reasons; `vllm-gateway explain --last-error` one request.",
        act="For an adapter: `vllm-gateway adapters list`. For a model: drain the backend that fails, or roll back.",
        severity="critical",
    ),
    Alert(
        name="AdapterMissing",
        expr=_has_problem("adapter_missing"),
        summary="Adapter {{ $labels.subject }} is on no backend, and could not be loaded",
        means="Requests for it are refused. The backends refused it: its path is not there, or its rank is too large.",
        look="`vllm-gateway adapters list` has the reason for each backend.",
        act="Mend the path, or `--max-lora-rank` of vLLM, then `vllm-gateway adapters load POOL/NAME ADAPTER`.",
        severity="critical",
    ),
    Alert(
        name="AdapterLoadFails",
        expr=_has_problem("adapter_failed"),
        summary="An adapter could not be loaded: {{ $labels.subject }}",
        means="Other backends have it and serve it. This one cannot help.",
        look="`vllm-gateway adapters list` has the reason.",
        act="As for AdapterMissing.",
    ),
    Alert(
        name="PoolSaturated",
        expr=_has_problem("saturated"),
        summary="No backend of {{ $labels.subject }} has room",
        means="New requests wait here, or are refused with a time to retry. What runs is not touched.",
        look="`vllm-gateway status` says what is full: the KV cache, or the limit of each backend.",
        act="Add a backend, or have its heaviest tenant send less (`vllm-gateway usage --by tenant`).",
        lasts="10s",
    ),
    Alert(
        name="BackendSlow",
        expr=_has_problem("slow"),
        summary="{{ $labels.subject }} writes tokens much more slowly than its peers",
        means="Its GPU is throttled, shared, or another kind. It gets less work, and its streams are slow.",
        look="`nvidia-smi -q -d PERFORMANCE` on its machine; `vllm-gateway status` has the factor.",
        act="`vllm-gateway drain POOL/NAME` keeps requests from it. `supervision.slow_ratio` restarts such a backend.",
    ),
    Alert(
        name="BackendLostRequests",
        expr=_has_problem("lost_requests"),
        summary="{{ $labels.subject }} has far more requests of this gateway than its engine runs",
        means="Requests are lost between its API server and its engine, or its metrics are wrong.",
        look="vLLM's log there; `RUNNING`, `WAITING` and `IN FLIGHT` of `vllm-gateway status`.",
        act="`vllm-gateway restart POOL/NAME` ends what hangs.",
    ),
    Alert(
        name="BackendMetricsStale",
        expr=_has_problem("metrics_stale"),
        summary="The metrics of {{ $labels.subject }} are out of date",
        means="Its load is unknown, so it gets fewer requests than it could do.",
        look="`curl URL/metrics` from the gateway's machine; `vllm-gateway doctor` names the flag.",
        act="Start vLLM without `--disable-log-stats`.",
        lasts="1m",
    ),
    Alert(
        name="GpuMemoryLow",
        expr=_has_problem("gpu_memory"),
        summary="A GPU of {{ $labels.subject }} has little memory left",
        means="85 % of the memory that launched servers leave free by their settings is in use. vLLM takes its share at"
        " its start; what runs out is the rest: CUDA graphs, NCCL, other processes. A GPU with a server that has"
        " `--kv-cache-memory-bytes` is not judged: how much such a server takes does not follow from its settings.",
        look="`nvidia-smi` on its machine: do only the processes of this server use the GPU? `gateway_gpu_memory_used_bytes`"
        " tells since when; the log has a line each minute (`gpu`).",
        act="End what does not belong there, or lower `gpu-memory-utilization` in `launch.args` and restart the server.",
    ),
    Alert(
        name="SharedStoreLost",
        expr=_has_problem("store_lost"),
        summary="Redis, or the store of the workers, does not answer",
        means="Requests are served. Each gateway counts limits by itself, and no backend is restarted.",
        look="`redis-cli -u URL ping`; `vllm-gateway check FILE --probe` tries the connection and the rights.",
        act="Start Redis, or correct `redis` in the settings. Nothing else needs to be done.",
    ),
    Alert(
        name="KeysUnknown",
        expr=_has_problem("keys_unknown"),
        summary="The gateway knows no keys, so no request is let in",
        means="They are in Redis, which does not answer, and there is no copy on this machine.",
        look="As for SharedStoreLost.",
        act="Start Redis. Once the gateway has read them it keeps a copy in `state`.",
        severity="critical",
    ),
    Alert(
        name="KeysInvalid",
        expr=_has_problem("keys_invalid"),
        summary="The keys file cannot be used; the keys before its last change are in force",
        means="The file has a mistake. A key that was revoked there still works; the next start would fail.",
        look="`vllm-gateway status` has the line; `vllm-gateway check FILE` names every mistake.",
        act="Mend the keys file. It is read again within a second.",
    ),
    Alert(
        name="DiskLow",
        expr=_has_problem("disk_low"),
        summary="The disk of the gateway's state is nearly full",
        means="When it is full, no server can be launched, and drains, limits and usage are not kept.",
        look="`df -h` and `du -sh` of `state`: logs of launched servers, or usage?",
        act="Free some space; lower `usage.ledger`; or set `state` to a folder on another disk.",
    ),
    Alert(
        name="StateUnwritable",
        expr=_has_problem("state_unwritable"),
        summary="The gateway cannot write its state folder",
        means="Drains, holds, names of backends and the history end with the gateway. It serves requests.",
        look="`vllm-gateway status` has the reason; `vllm-gateway check FILE` tries it, too. Run it as the gateway's user.",
        act="Let the gateway's user write there, or set `state` to another folder and restart the gateway.",
    ),
    Alert(
        name="ReloadFailed",
        expr=_has_problem("reload_failed"),
        summary="The last reload was refused; the settings before it are in force",
        means="The file has a mistake. Nothing changed; but the next start would fail.",
        look="`vllm-gateway config history` and `vllm-gateway check FILE` name the line.",
        act="Mend the file, then `vllm-gateway reload`.",
    ),
    Alert(
        name="ReplicasDiffer",
        expr=_has_problem("replicas_differ"),
        summary="{{ $labels.subject }} has other settings than its peers",
        means="A change reached some gateways and not the others, so clients get different answers.",
        look="`vllm-gateway replicas`.",
        act="Give all the same file, and reload each.",
        lasts="5m",
    ),
    Alert(
        name="KeyOverLimit",
        expr=_has_problem("key_over_limit"),
        summary="{{ $labels.subject }} asks for more than its limit",
        means="A key or its tenant is over a limit; those requests got a 429. Others are not touched.",
        look="`vllm-gateway status` has the rule and the numbers; `vllm-gateway keys effective ID` all its limits.",
        act="Nothing, if that is what the limit is for. Else `vllm-gateway keys update ID --limit RULE=N`; it replaces"
        " all limits of the key, so repeat `--limit` for each that stays. A tenant's are under `tenants` in the settings.",
    ),
    Alert(
        name="ClientTooSlow",
        expr=_has_problem("client_slow"),
        summary="{{ $labels.subject }} reads its stream too slowly",
        means="Its buffers are full. After `timeouts.client_write` the stream is cut. No other stream is held up.",
        look="The access log: `outcome` is `client_stalled`, `key_id` says whose.",
        act="Look at the client, or at a proxy in between: `vllm-gateway doctor --through URL`.",
    ),
)
