"""Each verb that asks a gateway has its endpoint, and each endpoint has its verb, or a reason to have none."""

import typer.main

from gateway.admin.table import TABLE
from gateway.cli.main import app

# They run or read something here, and ask no gateway.
LOCAL = {
    *("init", "serve", "demo", "sim", "check", "diagnose", "plan"),
    *("config schema", "config show", "config policy", "keys import"),
}
# What no verb asks for, and why.
NO_VERB = {
    "livez": "for probes",
    "readyz": "for probes",
    "metrics": "for Prometheus",
    "openapi": "for programs",
    "me": "for the dashboard",
    "pools": "`status` shows them",
    "pool": "`status` shows it",
    "backends": "`status` shows them",
    "backend": "`status` shows it",
    "tiers": "`keys effective` shows them",
    "verdict": "for the dashboard; `status` tells that of now",
    "series": "for the dashboard; `status` shows the last five minutes",
    "decisions": "`requests` lists all; `explain` tells of one",
    "decision": "`explain` tells it with all else of the request",
}

SAME = {"config reload": "reload", "top": "status", "bundle": "status"}  # verbs of one endpoint

PARTLY = {"doctor"}  # reads the metrics, among much that is no gateway's


def commands(group, before=""):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield before + name, command


VERBS = dict(commands(typer.main.get_command(app)))


def test_each_verb_has_its_endpoint():
    asked = {each.verb for each in TABLE if each.verb}
    assert VERBS.keys() - asked - SAME.keys() - PARTLY == LOCAL
    assert asked >= set(SAME.values())


def test_each_endpoint_has_its_verb_or_a_reason():
    assert {each.name for each in TABLE if not each.verb} == NO_VERB.keys()
    assert {each.verb for each in TABLE if each.verb} <= VERBS.keys()


def test_each_verb_that_asks_takes_server_and_token():
    for name, command in VERBS.items():
        options = {each.name for each in command.params}
        assert ({"server", "token"} <= options) == (name not in LOCAL), name
