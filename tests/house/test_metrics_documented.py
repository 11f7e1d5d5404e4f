import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from gateway.core.aio import SystemClock
from gateway.observe.instrument import Kind
from gateway.observe.instruments import INSTRUMENTS
from gateway.observe.metrics import Metrics
from gateway.observe.readings import Readings
from gateway.observe.reference import PROCESS_METRICS, reference

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "deploy" / "METRICS.md"


def exposed_names():
    text = b"".join(Metrics(Readings(), SystemClock()).pieces()[0]).decode()
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}


def test_reference_is_what_the_table_generates():
    assert REFERENCE.read_text() == reference(), (
        "run: python -m gateway.observe.reference > deploy/METRICS.md"
    )


def test_every_exposed_metric_is_in_the_reference_and_nothing_else():
    documented = set(re.findall(r"^(?:\| |- )`((?:gateway|process)_\w+)`", reference(), re.M))
    assert exposed_names() == documented


def test_instruments_keep_the_naming_rules():
    assert len({each.name for each in INSTRUMENTS}) == len(INSTRUMENTS)
    for each in INSTRUMENTS:
        assert re.fullmatch(r"gateway_[a-z]+(_[a-z]+)*", each.name)
        assert each.help
        assert each.help.strip() == each.help
        assert each.name.endswith("_total") == (each.kind is Kind.COUNTER)
        assert not re.search(r"_(count|sum|bucket|created|ms|millis|percent|kb|mb)$", each.name)
        assert all(re.fullmatch(r"[a-z]+", label) for label in each.labels)
        assert not {"le", "quantile", "job", "instance", "key", "path", "id"} & set(each.labels)
        assert bool(each.buckets) == (each.kind is Kind.HISTOGRAM)
        assert list(each.buckets) == sorted(set(each.buckets))


def test_process_metrics_are_those_of_the_library():
    exposed = {name for name in exposed_names() if name.startswith("process_")}
    assert exposed == set(PROCESS_METRICS)


def test_an_empty_exposition_parses():
    text = b"".join(Metrics(Readings(), SystemClock()).pieces()[0]).decode()
    assert len(list(text_string_to_metric_families(text))) == len(INSTRUMENTS) + len(
        PROCESS_METRICS
    )
