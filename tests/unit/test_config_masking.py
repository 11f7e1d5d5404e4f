"""What a finding shows of the file that it is about: never a secret, whatever the mistake is."""

import json
import pathlib
import re
import warnings

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML, MappingNode, SequenceNode
from ruamel.yaml.error import YAMLError

from gateway.config.load import check_text
from gateway.config.masking import Span, masked

SECRET = "hunter2"
POOL = "pools: {m: {backends: [http://h:1]}}\n"


def told(text):
    """Return all that is told of a file, for people and for programs."""
    findings = check_text(text, file="gw.yaml", folder=pathlib.Path("/nowhere"), env={}).findings
    shown = [f"{each.excerpt()}\n{each}\n{json.dumps(each.as_json())}" for each in findings]
    return "\n".join(shown)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("admin: {token: '${T:-}', x: 1}", "admin: {token: '${T:-}', x: *}"),
        ("admin: {token: '${T:-hunter2}', x: 1}", "admin: {token: '${T:-*******}', x: *}"),
        ("limits: {x: 1} # api_key: abc", "limits: {x: *}"),
        ("log: {level: warn, HF_TOKEN: abc}", "log: {level: warn, HF_TOKEN: ***}"),
        ("listen: 127.0.0.1:99999", "listen: 127.0.0.1:99999"),
        ("listen: 127.0.0.1:80a", "listen: 127.0.0.1:80a"),
        ("admin: {listen: '127.0.0.1:${P:-80a}'}", "admin: {listen: '127.0.0.1:**********}"),
        ("listen: 'https://me:x@h:1'", "listen: *************@***'"),
        ("listen: me:x@127.0.0.1:1", "listen: ****@***********"),
    ],
)
def test_an_excerpt_shows_the_values_of_known_settings_that_are_no_secrets(line, shown):
    (finding,) = check_text(POOL + line, folder=pathlib.Path(), env={"T": "x" * 20}).findings[:1]
    assert finding.excerpt().splitlines()[1] == f"    2 | {shown}"


def test_a_url_in_the_place_of_an_address_shows_no_password():
    assert SECRET not in told(
        POOL + f"listen: 'redis://:{SECRET}@h:6379'\nadmin: {{listen: me:{SECRET}@h:1}}"
    )


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        (("listen",), True),
        (("pools", "m", "backends", 0), True),
        (("pools", "m", "backends", 0, "url"), True),
        (("pools", "m", "backends", 0, "api_key"), False),
        (("pools", "m", "backends", 0, "launch", "port"), True),
        (("pools", "m", "backends", 0, "launch", "command", 1), False),
        (("pools", "m", "backends", 0, "launch", "args", "api-ke"), False),
        (("pools", "m", "backends", 0, "launch", "env", "PATH"), False),
        (("admin", "token"), False),
        (("redis",), False),
        (("admin", "tokn"), False),
        (("admin",), False),
        (("admin", "listen", "x"), False),
    ],
)
def test_what_may_be_shown(path, shown):
    (line,) = masked(["text"], [Span(path, 0, 0, 0, 4)], [])
    assert line == ("text" if shown else "****")


# Each holds one secret where an operator may have put it.
MISTAKES = [
    "pools: {m: {backends: ['http://user:hunter2@h:1']}}",
    "pools: {m: {backends: ['http://hunter2@h:1']}}",
    "pools: {m: {backends: ['http://hunter2\n  @h:1']}}",
    "pools: {m: {backends: ['h:1?key=hunter2']}}",
    "pools: {m: {backends: [{url: 'http://h:1', api_kee: hunter2}]}}",
    "pools: {m: {backends: [{url: 'http://h:1', api_key: [hunter2]}]}}",
    "pools: {m: {backends: [{url: 'http://h:1', api_key: '${NOPE}hunter2'}]}}",
    "pools: {m: {backends: [{url: 'http://h:1/${NOPE}hunter2'}]}}",
    "pools: {m: {backends: [{url: 'http://h:1', api_key: '${NOPE:-hunter2'}]}}",
    "pools: {m: {backends: [{url: 'http://h:1', api_key: '${hunter2!}'}]}}",
    "pools: {m: {backends: [{url: 'http://h:1', api_key: hunter2, nmae: b}]}}",
    "pools: {m: {backends: [{launch: {command: [vllm, --api-key, hunter2], prt: 1}}]}}",
    "pools: {m: {backends: [{launch: {command: [vllm, --api-key=hunter2], prt: 1}}]}}",
    "pools: {m: {backends: [{launch: {command: [vllm], env: {HF: hunter2}, prt: 1}}]}}",
    "pools: {m: {backends: [{launch: {command: [vllm], args: {api-key: hunter2}, prt: 1}}]}}",
    "admin: {token: hunter2, lissten: 1}",
    "admin: {token: !!int hunter2, lissten: 1}",
    "admin: {token: *hunter2}",
    "admin: {token: hunter2\n",
    "admin: token: hunter2",
    "admin:\n  token: |\n    hunter2\n    hunter2\n  lissten: 1",
    "redis: hunter2",
    "redis: {url: hunter2}",
    "x-common: &common {api_key: hunter2}\npools: {m: {backends: [{<<: *common, ulr: x}]}}",
    "x-a: &a hunter2\nx-b: &a hunter2\npools: {}",
    "limts: {}  # hunter2",
    "hunter: [hunter2, {a: hunter2}]",
    "listen: [\n'hunter2\n",
]


@pytest.mark.parametrize("text", MISTAKES)
def test_a_secret_is_in_no_finding(text, recwarn):
    assert told(text)
    assert SECRET not in told(text)
    assert not [each for each in recwarn if SECRET in str(each.message)]


def names_something(text):
    """Whether the secret came to be the name of a setting, a host or a variable, as nobody could tell."""
    if re.search(rf"\$\{{{SECRET}[}}:]", text):
        return True
    if f"://{SECRET}" in text and "@" not in text:
        return True
    if re.search(rf"{SECRET}['\"]?\s*:", text):
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            root = YAML(typ="safe", pure=True).compose(text)
    except (YAMLError, ValueError):
        return False
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if isinstance(node, MappingNode):
            if any(SECRET in str(key.value) for key, _ in node.value):
                return True
            nodes += [value for _, value in node.value]
        elif isinstance(node, SequenceNode):
            nodes += node.value
    return False


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(MISTAKES), st.data())
def test_nor_where_the_file_is_damaged_beside_it(text, data):
    """A character goes, or one comes that means something to YAML: anywhere but inside the secret."""
    inside = {
        at
        for start in range(len(text))
        if text.startswith(SECRET, start)
        for at in range(start + 1, start + 7)
    }
    at = data.draw(st.sampled_from([each for each in range(len(text)) if each not in inside]))
    sign = data.draw(st.sampled_from(["", *"{}[],:#'\"\t\n-&*!|>%@`$"]))
    drop = data.draw(st.booleans()) and not text.startswith(SECRET, at)
    damaged = text[:at] + sign + text[at + drop :]
    assume(not names_something(damaged))
    assert SECRET not in told(damaged)


# Each puts what a variable holds where it is not valid.
MISPLACED = [
    "timeouts: {total: '${S}'}",
    "trusted_proxies: ['${S}']",
    "parameters: {allow: ['${S}']}",
    "tiers: {gold: {addresses: ['${S}']}}",
    "tiers: {gold: {max_context: '${S}'}}",
    "log: {level: '${S}'}",
    "tenants: {a: {limits: {requests_per_minute: '${S}'}}}",
    "pools: {m: {backends: [http://h:1], adapters: ['${S}']}}",
    "pools: {m: {backends: [{url: http://h:1, kv_events: '${S}'}]}}",
    "pools: {m: {backends: [http://h:1], served_model: '${S}'}}",
]


@pytest.mark.parametrize("setting", MISPLACED)
@pytest.mark.parametrize("around", ["hunter2", " hunter2\n", "hunter2 " * 20])
def test_what_a_variable_holds_is_in_no_finding(setting, around):
    text = setting if setting.startswith("pools") else POOL + setting
    findings = check_text(text, folder=pathlib.Path(), env={"S": around + "!"}).findings
    assert findings
    assert not [each for each in findings if SECRET in f"{each}{each.excerpt()}"]


@pytest.mark.parametrize("value", [" ", "?", "a!"])
def test_a_short_value_of_a_variable_garbles_no_other_word(value):
    text = "pools: {m: {backends: [http://h:1], served_model: '${S}'}}"
    (finding,) = check_text(text, folder=pathlib.Path(), env={"S": value}).findings
    assert finding.message == f"pools.m.served_model: `{value}` is not a valid name"


def test_the_name_of_a_setting_is_told_where_a_variable_holds_the_same():
    text = "pools: {hunter2: {backends: [http://h:1], aliases: ['${S}']}}"
    (finding,) = check_text(text, folder=pathlib.Path(), env={"S": "hunter2"}).findings
    assert finding.message == "`${S}` is already the pool `${S}`"
    text = "pools: {hunter2: {backends: [http://h:1], max_context: '${S}'}}"
    (finding,) = check_text(text, folder=pathlib.Path(), env={"S": "hunter2"}).findings
    assert finding.message.startswith("pools.hunter2.max_context: ${S} is not a token count")
