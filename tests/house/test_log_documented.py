"""Every line that is logged names its event, and the page of log lines has what they consist of."""

import ast
import re
from pathlib import Path

from gateway.observe.instruments import UNKNOWN
from gateway.observe.log import AccessLine

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "deploy" / "LOGS.md").read_text()
METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def log_calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = node.func.value
            if node.func.attr in METHODS and isinstance(of, ast.Name) and of.id == "log":
                yield node


def names_event(call, tree):
    """Whether what is passed as `extra` has an event; it may be a name that is set before."""
    extra = next((each.value for each in call.keywords if each.arg == "extra"), None)
    if isinstance(extra, ast.Name):
        set_before = (
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == extra.id
        )
        return any(has_event(each) for each in set_before)
    return has_event(extra)


def has_event(value):
    keys = value.keys if isinstance(value, ast.Dict) else ()
    return any(isinstance(each, ast.Constant) and each.value == "event" for each in keys)


def test_every_line_names_its_event():
    unnamed = []
    calls = 0
    for path in (ROOT / "gateway").rglob("*.py"):
        tree = ast.parse(path.read_text())
        for call in log_calls(tree):
            calls += 1
            if not names_event(call, tree):
                unnamed.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert calls > 40
    assert unnamed == []


def test_a_line_without_an_event_would_be_seen():
    tree = ast.parse("log.info('hi', extra={'backend': 1})")
    assert [names_event(each, tree) for each in log_calls(tree)] == [False]


def test_the_page_has_the_fields_of_an_access_line_in_their_order():
    table = PAGE.partition("## Requests")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)`", table, re.M)
    assert named == [*AccessLine.__struct_fields__]
    assert f"`{UNKNOWN}` where it was refused before that was known" in table
