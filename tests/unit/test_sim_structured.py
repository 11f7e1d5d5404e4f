"""The simulator's replies fit what a request demands, and its tool calls what the tool declares."""

import json
from datetime import date, datetime
from enum import StrEnum
from typing import Annotated, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, Field, HttpUrl, TypeAdapter

from gateway.sim.errors import SimError
from gateway.sim.structured import arguments, demanded, example

WORDS = "the sea sun"


class Sky(StrEnum):
    CLEAR = "clear"
    GREY = "grey"


class Place(BaseModel):
    name: str = Field(min_length=20, max_length=24)
    code: str = Field(max_length=2)
    where: tuple[float, float]


class Weather(BaseModel):
    kind: Literal["weather"]
    place: Place
    sky: Sky
    warm: bool
    degrees: float = Field(gt=0, lt=1)
    below: int = Field(le=-3)
    wind: int = Field(gt=7, multiple_of=5)
    at: datetime
    day: date
    id: UUID
    note: str | None
    tags: list[str] = Field(min_length=3, max_length=3)
    nearby: list["Weather"]
    source: HttpUrl | None = None


@pytest.mark.parametrize(
    "model",
    [
        Weather,
        Place,
        list[Place],
        Annotated[int, Field(ge=5, le=5)],
        Annotated[float, Field(lt=-2.5)],
        Annotated[str, Field(min_length=40)],
        dict[str, int],
        int | str,
        None,
        Literal[7],
    ],
)
def test_an_example_fits_its_schema(model):
    adapter = TypeAdapter(model)
    adapter.validate_json(example(adapter.json_schema(), WORDS), strict=False)


def test_all_properties_are_given_and_free_strings_are_the_words():
    told = json.loads(example(Weather.model_json_schema(), WORDS))
    assert set(told) == set(Weather.model_fields)
    assert told["note"] == WORDS


def test_several_schemas_that_all_hold_give_the_properties_of_all():
    one = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    other = {"properties": {"b": {"const": 2}}}
    schema = {"allOf": [{"$ref": "#/$defs/one"}, other], "$defs": {"one": one}}
    assert json.loads(example(schema, WORDS)) == {"a": 0, "b": 2}


def test_of_what_else_has_to_hold_nothing_is_left_out():
    """As tools declare that one of two arguments has to be there."""
    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    schema = {"type": "object", "properties": numbers, "anyOf": [{"required": ["b"]}, True]}
    assert json.loads(example(schema, WORDS)) == {"a": 0, "b": 0}


def test_a_schema_that_demands_itself_ends():
    schema = {"type": "object", "properties": {"again": {"$ref": "#"}}, "required": ["again"]}
    assert len(example(schema, WORDS)) < 1000


class Link(BaseModel):
    """As OpenAI's strict mode wants it: nothing may be left out."""

    value: int
    before: "Link | None"
    after: "Link | None"


def test_a_chain_in_which_nothing_may_be_left_out_ends_and_fits():
    chain = example(Link.model_json_schema(), WORDS)
    assert Link.model_validate_json(chain, strict=True).after is not None
    assert len(chain) < 2000


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}}


@pytest.mark.parametrize(
    ("body", "reply"),
    [
        ({"response_format": {"type": "json_object"}}, '{"value": "the sea sun"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            '{"a": true}',
        ),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, '{"a": true}'),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, '{"a": true}'),
        ({"structured_outputs": {"json": SCHEMA}}, '{"a": true}'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, '{"a": true}'),
        ({"structured_outputs": {"json_object": True}}, '{"value": "the sea sun"}'),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes"),
    ],
)
def test_each_way_to_demand_a_form_is_known(body, reply):
    form = demanded(body)
    assert form is not None
    assert form(WORDS) == reply


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "text": {"verbosity": "low"}},
        {"structured_outputs": {"regex": "a+"}},
    ],
)
def test_plain_text_is_no_form(body):
    assert demanded(body) is None


@pytest.mark.parametrize("schema", ["{", {"properties": 7}, {"minLength": "x"}, {"allOf": [3]}])
def test_a_schema_that_cannot_be_read_is_the_clients_fault(schema):
    with pytest.raises(SimError) as refused:
        example(schema, WORDS)
    assert refused.value.status == 400


def test_a_tool_is_called_with_what_it_declares():
    tools = [
        {"type": "function", "function": {"name": "other", "parameters": {"properties": {}}}},
        {"type": "function", "function": {"name": "look", "parameters": SCHEMA}},
    ]
    assert arguments(tools, "look", WORDS) == '{"a": true}'
    assert arguments([{"name": "look", "input_schema": SCHEMA}], "look", WORDS) == '{"a": true}'
    assert arguments(tools, "other", WORDS) == "{}"
    assert arguments([{"name": "look"}], "look", WORDS) == '{"value": "the sea sun"}'
