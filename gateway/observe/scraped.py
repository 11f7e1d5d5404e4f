"""Read the values that others own into the metrics, at each scrape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.core.types import Phase
from gateway.observe import instruments as table
from gateway.observe.families import Labels
from gateway.observe.readings import BackendReading, Readings

Values = Mapping[str, dict[Labels, float]]  # of all instruments but histograms, by name

_READ_WHEN_SCRAPED: Final = (
    table.IN_FLIGHT,
    table.LIMIT,
    table.QUEUED,
    table.QUEUED_TOKENS,
    table.RESTARTS_HELD,
    table.CANARY,
    table.BACKEND_PHASE,
    table.EJECTED,
    table.SCRAPE_AGE,
    table.RUNNING,
    table.WAITING,
    table.KV_USAGE,
    table.GPU_MEMORY_USED,
    table.GPU_MEMORY,
    table.GPU_BUSY,
    table.PREFIX_HASHES,
    table.EVENTS_KNOWN,
    table.OPEN_CONNECTIONS,
)

# Counters that their owners keep; each reading replaces them.
KEPT_BY_OTHERS: Final = frozenset(
    each.name
    for each in (
        table.CANARY_REQUESTS,
        table.ADAPTER_CHANGES,
        table.ADAPTER_LOAD_SECONDS,
        table.CONNECTIONS_SHED,
        table.ACCESS_LOG_DROPPED,
        table.TENANT_TOKENS,
        table.LIMIT_REFUSALS,
    )
)


def read_gauges(values: Values, readings: Readings, now: float) -> None:
    """Replace the gauges and the counters that others own."""
    for each in _READ_WHEN_SCRAPED:
        values[each.name].clear()
    for backend in readings.backends():
        labels = (backend.pool, backend.name)
        replaced = labels in values[table.IN_FLIGHT.name]
        values[table.IN_FLIGHT.name][labels] += backend.in_flight
        if replaced:  # a leaving backend whose name has a new owner: only its requests count
            continue
        _read_backend(values, backend, labels, now)
    for pool, queued in readings.queues().items():
        values[table.QUEUED.name][(pool,)] = queued.requests
        values[table.QUEUED_TOKENS.name][(pool,)] = queued.tokens
    _read_gpus(values, readings)
    bodies, most = values[table.BODY_BYTES.name], values[table.BODY_BYTES_LIMIT.name]
    bodies[()], most[()] = readings.bodies()
    for name, kept in readings.kept().items():
        values[name].update(kept)


def _read_gpus(values: Values, readings: Readings) -> None:
    for backend_id, gpus in readings.gpus().items():
        pool, _, name = backend_id.rpartition("/")
        if (pool, name) not in values[table.IN_FLIGHT.name]:
            continue  # it left since the driver was asked
        for gpu in gpus:
            labels = (pool, name, gpu.name)
            values[table.GPU_MEMORY_USED.name][labels] = gpu.used_bytes
            values[table.GPU_MEMORY.name][labels] = gpu.total_bytes
            if gpu.busy_ratio is not None:
                values[table.GPU_BUSY.name][labels] = gpu.busy_ratio


def _read_backend(values: Values, backend: BackendReading, labels: Labels, now: float) -> None:
    for phase in Phase:
        values[table.BACKEND_PHASE.name][*labels, phase.value] = backend.phase is phase
    values[table.EJECTED.name][labels] = backend.kept_out
    if (allowed := backend.allowed(now)) is not None:
        values[table.LIMIT.name][labels] = allowed
    sample = backend.sample
    age_s = now - sample.at if sample is not None else float("inf")
    values[table.SCRAPE_AGE.name][labels] = age_s
    if sample is not None and not backend.stale(now):
        values[table.RUNNING.name][labels] = sample.running
        values[table.WAITING.name][labels] = sample.waiting
        if sample.kv_usage_ratio is not None:
            values[table.KV_USAGE.name][labels] = sample.kv_usage_ratio
    if backend.prefix_index is not None:
        values[table.PREFIX_HASHES.name][labels] = len(backend.prefix_index)
    if (events := backend.kv_events) is not None:
        values[table.EVENTS_KNOWN.name][labels] = events.known
        values[table.EVENTS_LOSSES.name][labels] = events.losses
        values[table.EVENTS_GARBLED.name][labels] = events.garbled + events.strange
