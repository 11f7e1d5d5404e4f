"""The shipped dashboard, read by the models that Grafana generates from its own schema.

A name that the models do not know is dropped when they write what they read; a value of another type
than they tell is seen by their type hints.
"""

import json
import pathlib
from typing import get_type_hints

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from pydantic import ConfigDict, TypeAdapter, ValidationError

FILE = pathlib.Path(__file__).parents[2] / "deploy/grafana/vllm-gateway.json"
plugins.register_default_plugins()  # the options of panels, and what asks Prometheus
ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)


def shipped():
    return json.loads(FILE.read_text())


def dropped(given, kept, path="dashboard"):
    """Yield what was given and not kept, at any depth."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            yield from dropped(value, kept.get(name), f"{path}.{name}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for at, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from dropped(one, other, f"{path}[{at}]")
    elif given != kept:
        yield path


def mistyped(value, path="dashboard"):
    """Yield the fields of a model whose value is of another type than it tells, at any depth."""
    if isinstance(value, list):
        for at, each in enumerate(value):
            yield from mistyped(each, f"{path}[{at}]")
    elif hasattr(value, "to_json"):
        for name, hint in get_type_hints(type(value)).items():
            try:
                TypeAdapter(hint, config=ANY_CLASS).validate_python(getattr(value, name))
            except ValidationError:
                yield f"{path}.{name}"
            yield from mistyped(getattr(value, name), f"{path}.{name}")


def faults(made):
    model = Dashboard.from_json(made)
    kept = json.loads(JSONEncoder().encode(model))
    return [*dropped(made, kept), *mistyped(model)]


def test_grafana_knows_every_name_and_value_of_the_dashboard():
    assert len(shipped()["panels"]) > 20
    assert faults(shipped()) == []


def graph(made):
    return next(each for each in made["panels"] if each["type"] == "timeseries")


@pytest.mark.parametrize(
    ("spoilt", "fault"),
    [
        (lambda made: made.update(refesh="10s"), "refesh"),
        (lambda made: graph(made)["gridPos"].update(width=3), "gridPos.width"),
        (lambda made: graph(made)["targets"][0].update(legend="x"), "targets[0].legend"),
        (lambda made: graph(made)["options"]["legend"].update(place="right"), "legend.place"),
        (lambda made: graph(made).update(title=7), "title"),
        (lambda made: graph(made)["options"]["legend"].update(displayMode="rows"), "display_mode"),
        (lambda made: made["templating"]["list"][0].update(hide="no"), "hide"),
    ],
)  # fmt: skip
def test_a_name_or_value_that_grafana_does_not_know_would_be_seen(spoilt, fault):
    made = shipped()
    spoilt(made)
    assert [each for each in faults(made) if each.endswith(fault)]
