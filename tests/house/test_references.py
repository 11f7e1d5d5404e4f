"""The references in deploy/ are what the source says, and no error code is missing from its page."""

import ast
from pathlib import Path

import pytest

from gateway.cli import reference as commands
from gateway.config import reference as settings
from gateway.core import codes
from gateway.core.codes import CODES
from gateway.observe import grafana, rules
from gateway.wire.parameters import _CODES as OF_PARAMETERS

ROOT = Path(__file__).parents[2]
# What no client reads: the simulator's codes, exit codes, findings of `check`, the admin API's problems.
ELSEWHERE = {"sim", "cli", "config", "vllmlog", "launch", "heal", "admin"}


@pytest.mark.parametrize(
    ("page", "module"),
    [("CONFIGURATION.md", settings), ("COMMANDS.md", commands), ("ERRORS.md", codes)],
)
def test_a_reference_is_what_its_module_generates(page, module):
    assert (ROOT / "deploy" / page).read_text() == module.reference(), (
        f"run: python -m {module.__name__} > deploy/{page}"
    )


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("prometheus/alerts.yaml", rules.alerts_yaml()),
        ("RUNBOOKS.md", rules.runbooks()),
        ("grafana/vllm-gateway.json", grafana.text()),
    ],
)
def test_alerts_runbooks_and_dashboard_are_what_the_table_of_alerts_makes(page, text):
    assert (ROOT / "deploy" / page).read_text() == text, "run: make references"


def codes_in(tree):
    """Return the texts that a module uses as error codes: `code="..."`, `default_code = "..."`, `Fault(_, _, "...")`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="Fault"), args=[_, _, value, *_]):
                yield from texts_of(value)
            case ast.keyword(arg="code", value=value):
                yield from texts_of(value)
            case ast.Assign(targets=[ast.Name(id="default_code" | "code")], value=value):
                yield from texts_of(value)
            case ast.AnnAssign(target=ast.Name(id="default_code"), value=value):
                yield from texts_of(value)


def texts_of(value):
    """Return the texts that an expression may be."""
    match value:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=one, orelse=other):
            yield from (*texts_of(one), *texts_of(other))
        case ast.Call(func=ast.Attribute(attr="get"), args=[_, other]):
            yield from texts_of(other)


def codes_of_the_source():
    found = set(OF_PARAMETERS.values())
    for path in (ROOT / "gateway").rglob("*.py"):
        if path.relative_to(ROOT).parts[1] not in ELSEWHERE:
            found |= set(codes_in(ast.parse(path.read_text())))
    return found


def test_the_page_of_errors_has_each_code_that_the_source_raises_and_no_other():
    raised = codes_of_the_source()
    # Where an error has no code, its type stands for it: a bug's is `server_error`.
    assert raised | {"server_error"} == set(CODES)


def test_a_new_code_in_the_source_would_be_seen():
    tree = ast.parse('raise RequestError("no", code="new_one" if odd else "other_one")')
    assert set(codes_in(tree)) == {"new_one", "other_one"}
