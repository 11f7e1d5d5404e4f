"""Alerts and the dashboard ask for metrics and labels that exist, and each alert has a runbook."""

import itertools
import json
import re
from typing import get_args

import pytest

from gateway.config.load import check_text
from gateway.core.types import Outcome, Phase
from gateway.ingress.connections import Shed
from gateway.observe import grafana
from gateway.observe.instrument import Kind
from gateway.observe.instruments import INSTRUMENTS
from gateway.observe.recent import ERRORS
from gateway.observe.reference import PROCESS_METRICS
from gateway.observe.rules import ALERTS, alerts_yaml, runbooks
from gateway.ops.problems import ProblemKind
from gateway.ops.states import BackendState

LABELS = {each.name: set(each.labels) for each in INSTRUMENTS}
SCRAPED = {"instance", "job", "le"}  # what Prometheus adds, and the bound of a bucket
# The values of labels that expressions name.
VALUES = {
    "phase": {each.value for each in Phase},
    "outcome": {each.value for each in Outcome},
    "verdict": {"worse"},
    "shadow": {"true", "false"},
    "state": set(get_args(BackendState)),
    "kind": {"completion", "cached", *get_args(ProblemKind)},
    "reason": {each.value for each in Shed},
    "job": {"vllm-gateway"},
    "pool": {"_unknown"},
    "shared": {""},  # before there was this label
}
ASKED = [(each.name, each.expr) for each in ALERTS] + [
    (panel.title, query.expr)
    for panels in grafana.ROWS.values()
    for panel in panels
    for query in panel.queries
]
selector = re.compile(r"((?:gateway|process)_\w+)(?:\{(.*?)\})?")
matcher = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def base(name):
    """The instrument of a series: a histogram has three kinds of them."""
    whole = re.sub(r"_(bucket|sum|count)$", "", name)
    return whole if whole in LABELS else name


def series():
    """The names of all series that a scrape of the gateway can have, and `up` of the scrape itself."""
    names = {"up", *PROCESS_METRICS}
    for each in INSTRUMENTS:
        parts = ("_bucket", "_sum", "_count") if each.kind is Kind.HISTOGRAM else ("",)
        names.update(each.name + part for part in parts)
    return names


def series_of(expr):
    """The names of the series that a PromQL expression asks for."""
    bare = re.sub(r'"[^"]*"', '""', expr)
    return set(re.findall(r"\b(?:(?:gateway|process)_\w+|up\b)", bare))


@pytest.mark.parametrize(("name", "expr"), ASKED, ids=[each[0] for each in ASKED])
def test_what_is_asked_for_exists(name, expr):
    assert series_of(expr)
    assert series_of(expr) <= series()
    for metric, matchers in selector.findall(expr):
        known = LABELS.get(base(metric), set()) | SCRAPED
        for label, how, value in matcher.findall(matchers):
            assert label in known, f"{metric} has no label {label}"
            if "$" not in value:
                told = value.split("|") if how.endswith("~") else [value]
                assert set(told) <= VALUES[label], f"{label} is never one of {told}"


@pytest.mark.parametrize(("name", "expr"), ASKED, ids=[each[0] for each in ASKED])
def test_what_is_grouped_by_is_a_label_of_what_is_summed(name, expr):
    known = set().union(*(LABELS.get(base(each), set()) for each in series_of(expr))) | SCRAPED
    for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", expr):
        assert {each.strip() for each in labels.split(",")} <= known


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_a_summary_names_labels_that_its_alert_has(alert):
    grouped = re.search(r"\b(?:sum|count) by \(([^)]*)\)", alert.expr.partition(" on ")[0])
    has = (
        {each.strip() for each in grouped[1].split(",")}
        if grouped
        else set().union(*(LABELS.get(base(each), set()) for each in series_of(alert.expr)))
        | SCRAPED
    )
    assert set(re.findall(r"\$labels\.(\w+)", alert.summary)) <= has


# The ten incidents that are rehearsed, and a full GPU: what the gateway judges of each, and the alert that names it.
INCIDENTS = {
    "frozen": "BackendFrozen",
    "crash-looping": "BackendCrashLoops",
    "adapter_missing": "AdapterMissing",
    "store_lost": "SharedStoreLost",
    "reload_failed": "ReloadFailed",
    "keys_invalid": "KeysInvalid",
    "slow": "BackendSlow",
    "key_over_limit": "KeyOverLimit",
    "client_slow": "ClientTooSlow",
    "disk_low": "DiskLow",
    "gpu_memory": "GpuMemoryLow",
}


@pytest.mark.parametrize(("judged", "name"), INCIDENTS.items())
def test_what_the_gateway_judges_of_an_incident_has_an_alert_that_fires_at_once(judged, name):
    (alert,) = [each for each in ALERTS if each.name == name]
    assert judged in VALUES["state"] | VALUES["kind"]
    assert re.search(rf'"(?:.*\|)?{judged}(?:\|.*)?"', alert.expr)
    assert alert.lasts == "0s"


@pytest.mark.parametrize("name", ["RequestsFail", "Errors by pool"])
def test_what_counts_as_a_failure_is_what_status_and_the_dashboard_count(name):
    (expr,) = [expr for each, expr in ASKED if each == name]
    (outcomes,) = re.findall(r'outcome=~"([^"]*)"', expr)
    assert set(outcomes.split("|")) == ERRORS


def test_names_of_alerts_are_told_once():
    names = [each.name for each in ALERTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_each_alert_has_a_runbook_that_says_what_it_means_where_to_look_and_what_to_do(alert):
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", runbooks(), re.M | re.S))
    parts = dict(re.findall(r"^- \*\*(.*?)\.\*\* (.+)$", sections[alert.name], re.M))
    assert parts == {
        "What it means": alert.means,
        "See the cause": alert.look,
        "What to do": alert.act,
    }
    assert all(len(text.split()) >= 2 for text in parts.values())
    url = f"http://{{{{ $labels.instance }}}}/runbooks/{alert.name}"
    assert f"runbook_url: '{url}'" in alerts_yaml()


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_says_which_gateway_it_is_about(alert):
    """Its runbook is served there."""
    grouped = re.findall(r"\b(?:sum|count) by \(([^)]*)\)", alert.expr.partition(" on ")[0])
    assert all("instance" in each.split(", ") for each in grouped)


def test_the_runbook_of_a_worse_canary_says_what_the_settings_take(tmp_path):
    (alert,) = [each for each in ALERTS if each.name == "CanaryWorse"]
    weight = re.search(r"backends of its revision `weight: (\S+)`", alert.act)[1]
    backends = f"[http://a:1, {{url: http://b:1, revision: v2, weight: {weight}}}]"
    canary = "{revision: v2, weight: 0.1}"
    text = f"keys: none\npools: {{m: {{canary: {canary}, backends: {backends}}}}}"
    loaded = check_text(text, folder=tmp_path).loaded
    assert loaded is not None
    assert loaded.config.pools["m"].backends[1].weight == 0


def test_a_metric_that_does_not_exist_would_be_seen():
    assert series_of('rate(gateway_gone_total{pool="up"}[5m]) > process_max_fds') == {
        "gateway_gone_total",
        "process_max_fds",
    }
    assert "gateway_gone_total" not in series()


class TestDashboard:
    made = grafana.dashboard()

    def test_it_has_what_grafana_needs(self):
        assert self.made["schemaVersion"] >= 36
        assert {"uid", "title", "time", "templating", "panels", "refresh"} <= set(self.made)
        assert json.loads(json.dumps(self.made)) == self.made

    def test_panels_have_numbers_of_their_own_and_do_not_overlap(self):
        panels = self.made["panels"]
        assert len({each["id"] for each in panels}) == len(panels)
        taken = set()
        for each in panels:
            place = each["gridPos"]
            assert place["x"] + place["w"] <= 24
            cells = set(
                itertools.product(
                    range(place["x"], place["x"] + place["w"]),
                    range(place["y"], place["y"] + place["h"]),
                )
            )
            assert taken.isdisjoint(cells), each["title"]
            taken |= cells

    def test_each_panel_asks_something_of_the_chosen_source(self):
        (source, *_) = self.made["templating"]["list"]
        for each in self.made["panels"]:
            if each["type"] == "row":
                continue
            assert each["datasource"]["uid"] == f"${{{source['name']}}}"
            letters = [target["refId"] for target in each["targets"]]
            assert letters
            assert len(set(letters)) == len(letters)

    def test_expressions_and_legends_use_variables_and_labels_that_exist(self):
        variables = {each["name"] for each in self.made["templating"]["list"]}
        for each in self.made["panels"]:
            for target in each.get("targets", ()):
                used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
                assert used <= variables
                known = set().union(
                    *(LABELS.get(base(name), set()) for name in series_of(target["expr"]))
                )
                legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                assert legend <= known | SCRAPED
