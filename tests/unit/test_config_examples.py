"""The files in configs/, their schema, and settings written back."""

from __future__ import annotations

import json
import pathlib

import jsonschema
import pytest
from ruamel.yaml import YAML

from gateway.config.load import check_file, check_text
from gateway.config.models import Config
from gateway.config.schema import json_schema
from gateway.config.spell import flat, spell

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
EXAMPLES = sorted(CONFIGS.glob("*.yaml"))


def test_there_are_examples():
    names = {path.name for path in EXAMPLES}
    assert names >= {"minimal.yaml", "two-pools-lora.yaml", "production.yaml"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_loads_without_a_finding_in_an_empty_environment(path):
    checked = check_file(path, {})
    assert [str(each) for each in checked.findings] == []
    assert checked.loaded is not None


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_fits_the_schema_that_it_names(path):
    assert path.read_text().startswith("# yaml-language-server: $schema=./gateway.schema.json\n")
    jsonschema.validate(YAML(typ="safe").load(path), json_schema())


def test_the_shipped_schema_is_up_to_date():
    shipped = json.loads((CONFIGS / "gateway.schema.json").read_text())
    assert shipped == json_schema(), "run: vllm-gateway config schema > configs/gateway.schema.json"
    jsonschema.Draft202012Validator.check_schema(shipped)


def test_every_setting_has_help_and_every_default_fits_the_schema():
    schema = json_schema()
    sections = [each for each in schema["$defs"].values() if "properties" in each]
    assert all(section["description"] for section in sections)
    for section in [schema, *sections]:
        for name, setting in section["properties"].items():
            # A help that repeats the section's own is left to the section.
            assert setting.get("description") or "$ref" in setting, name
            if "default" in setting:
                whole = {"$defs": schema["$defs"], **setting}
                jsonschema.Draft202012Validator(whole).validate(setting["default"])


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("{listen: '127.0.0.1:80'}", True),
        ("{listen: 8080}", False),
        ("{keys: none}", True),
        ("{keys: off}", False),
        ("{trusted_proxies: [127.0.0.1, 10.0.0.0/8, '::1', unix]}", True),
        ("{timeouts: {stall: 30s}}", True),
        ("{timeouts: {stall: 30}}", False),
        ("{timeouts: {stall: '${STALL}'}}", True),
        ("{limits: {max_headers: '${N}'}}", True),
        ("{limits: {max_headers: many}}", False),
        ("{log: {level: '${L:-info}'}}", True),
        ("{log: {level: loud}}", False),
        ("{pools: {m: {backends: [http://h:1], max_context: 32k}}}", True),
        ("{pools: {m: {backends: [http://h:1], max_context: none}}}", False),
        ("{pools: {m: {backends: [{url: http://h:1, weigth: 1}]}}}", False),
        ("{x-anchors: [1], typo: 1}", False),
        ("{x-anchors: [1]}", True),
    ],
)
def test_an_editor_sees_what_check_sees(text, fits):
    tree = {"pools": {"m": {"backends": ["http://h:1"]}}, **YAML(typ="safe").load(text)}
    errors = list(jsonschema.Draft202012Validator(json_schema()).iter_errors(tree))
    assert (errors == []) == fits
    env = {"STALL": "30s", "N": "3"}
    folder = pathlib.Path("/")
    checked = check_text(json.dumps(tree), folder=folder, env=env)
    assert (checked.loaded is not None) == fits


def test_settings_written_back_mean_the_same():
    path = CONFIGS / "two-pools-lora.yaml"
    loaded = check_file(path, {}).loaded
    assert loaded is not None
    again = Config.model_validate(spell(loaded.config))
    assert again == loaded.config


def test_settings_written_back_hide_secrets_and_keep_units():
    text = "pools: {m: {backends: [{url: http://h:1, api_key: s3cret}]}}\nkeys: none\n"
    loaded = check_text(text, folder=pathlib.Path("/"), env={}).loaded
    assert loaded is not None
    values = {name: value for _, name, value in flat(loaded.config)}
    assert values["pools.m.backends[0].api_key"] == "***"
    assert values["pools.m.max_context"] == "auto"
    assert values["keys"] == "none"
    assert values["limits.stream_buffer"] == "256KiB"
    assert values["timeouts.upstream_keep_alive"] == "3s"
    assert values["listen"] == "127.0.0.1:8080"
    assert "s3cret" not in json.dumps(spell(loaded.config))


@pytest.mark.parametrize(
    ("tier", "told"),
    [
        ("{models: [a, 'b*'], limits: {requests_per_minute: 60}, max_output: 4k}", None),
        ("{parameters: {allow: [priority]}, addresses: [10.0.0.0/8], priority: 3}", None),
        ("{limits: {requests: 60}}", "tiers.gold.limits: unknown limit 'requests'"),
        ("{max_output: 0}", "tiers.gold.max_output: must be at least 1"),
        ("{addresses: [10.0.0.1/8]}", "tiers.gold.addresses: `10.0.0.1/8` is no address"),
        ("{modles: [a]}", "unknown key `modles` in tiers.gold"),
        ("{fallback: maybe}", "tiers.gold.fallback: expected true or false"),
    ],
)
def test_a_tier_says_what_a_key_may(tmp_path, tier, told):
    text = f"pools: {{m: {{backends: [http://h:1]}}}}\ntiers: {{gold: {tier}}}\n"
    checked = check_text(text, folder=tmp_path)
    assert (told is None) == (checked.loaded is not None)
    assert told is None or told in str(checked.findings[0])
    if told is None:
        values = YAML(typ="safe").load(text)
        jsonschema.Draft202012Validator(json_schema()).validate(values)
        shown = {name: value for _, name, value in flat(checked.loaded.config)}
        if "limits" in tier:
            assert shown["tiers.gold.limits"] == {"requests_per_minute": 60}
