"""The error tree: every refusal has all that a reply, a metric and a log line need."""

import importlib
import inspect
import json
import pkgutil
import re

import pytest

import gateway
from gateway.core import errors
from gateway.core.errors import ConfigError, GatewayError, Rejected, RequestError
from gateway.core.ratelimited import RateLimited
from gateway.core.types import Dialect, Outcome, ShedReason
from gateway.wire.replies import error_body, error_headers

for found in pkgutil.walk_packages(gateway.__path__, "gateway."):
    importlib.import_module(found.name)  # so that a subclass anywhere is seen

# Source: Anthropic API reference, "Errors".
ANTHROPIC_TYPES = {
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
}
DRAWN = re.compile(r"^( +(?:\|   )*)[|`]-- (\w+) +(.*)$", re.M)


def below(cls):
    """Return every subclass of the gateway's own, however deep."""
    for each in cls.__subclasses__():
        if each.__module__.startswith("gateway."):
            yield each
            yield from below(each)


ALL = sorted(set(below(GatewayError)), key=lambda each: each.__name__)
OF_THE_MODULE = {
    name: each
    for name, each in inspect.getmembers(errors, inspect.isclass)
    if each.__module__ == errors.__name__
}


def drawn():
    """Read the tree at the top of the module: name, name of the parent, rest of the line."""
    path = ["GatewayError"]
    for indent, name, rest in DRAWN.findall(errors.__doc__):
        depth = len(indent) // 4
        path[depth:] = [name]
        yield name, path[depth - 1], rest


def made(error, message, **more):
    """Make an error; one of overload has a reason, and no code or parameter of its own."""
    if error is errors.Overloaded:
        return error(message, reason=ShedReason.QUEUE_FULL, retry_after_s=1)
    return error(message) if error is errors.EngineFull else error(message, **more)


@pytest.mark.parametrize("error", ALL)
def test_every_error_has_a_status_a_type_and_an_outcome(error):
    assert 400 <= error.status <= 599
    assert error.type
    assert re.fullmatch(r"[a-z_]+", error.type)
    assert isinstance(error.outcome, Outcome)
    assert error.outcome not in (Outcome.OK, Outcome.BUG)


@pytest.mark.parametrize("error", ALL)
def test_a_fault_of_the_caller_is_4xx_and_no_other_is(error):
    callers = issubclass(
        error,
        RequestError
        | errors.AccessError
        | errors.ClientGone
        | errors.TooManyWaiting
        | errors.TooManyFailedKeys
        | RateLimited,
    )
    assert (error.status < 500) == callers


@pytest.mark.parametrize("error", [*ALL, GatewayError])
@pytest.mark.parametrize("dialect", [each for each in Dialect if each is not Dialect.MESSAGES])
def test_every_error_is_written_with_four_keys(error, dialect):
    told = json.loads(error_body(made(error, "Too much.", param="n"), "req-1", dialect))
    assert set(told) == {"error"}
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert "Too much." in told["error"]["message"]
    assert told["error"]["type"] == error.type
    assert told["error"]["param"] == (None if issubclass(error, errors.Overloaded) else "n")
    assert told["error"]["code"] is None or isinstance(told["error"]["code"], str)


@pytest.mark.parametrize("error", ALL)
def test_every_error_has_a_null_param_unless_one_is_named(error):
    assert json.loads(error_body(made(error, "x"), "req-1"))["error"]["param"] is None


@pytest.mark.parametrize("error", ALL)
def test_every_error_is_written_in_anthropics_form(error):
    fault = made(error, "Too much.")
    told = json.loads(error_body(fault, "req-1", Dialect.MESSAGES))
    assert set(told) == {"type", "error", "request_id"}
    assert (told["type"], told["request_id"]) == ("error", "req-1")
    assert set(told["error"]) == {"type", "message", "details"}
    assert told["error"]["type"] in ANTHROPIC_TYPES
    assert told["error"]["details"] == {"error_code": fault.code or fault.type}


@pytest.mark.parametrize("error", ALL)
def test_every_error_has_its_code_and_says_what_it_was_told(error):
    assert made(error, "x").code == error.default_code
    assert str(made(error, "what it says")) == "what it says"


@pytest.mark.parametrize("error", [each for each in ALL if not issubclass(each, errors.Overloaded)])
def test_a_code_given_where_it_is_raised_wins(error):
    assert error("x", code="special").code == "special"


@pytest.mark.parametrize("seconds", [-5, 0, 0.2, 1, 2.5, 30, 31, 1e9])
def test_clients_are_asked_back_in_one_to_thirty_seconds(seconds):
    headers = dict(error_headers(Rejected("x", retry_after_s=seconds)))
    assert 1 <= int(headers[b"retry-after"]) <= 30
    assert 1000 <= int(headers[b"retry-after-ms"]) <= 30_000


def test_clients_are_told_no_time_when_there_is_none():
    assert b"retry-after" not in dict(error_headers(Rejected("x")))


@pytest.mark.parametrize("error", [Rejected, *below(Rejected)])
def test_every_refusal_for_capacity_says_which(error):
    refusal = made(error, "x")
    assert isinstance(refusal.shed_reason, ShedReason)
    told = dict(error_headers(refusal))[b"x-gateway-shed-reason"]
    assert told.decode() == refusal.shed_reason.value


@pytest.mark.parametrize("reason", list(ShedReason))
def test_an_overload_says_the_reason_it_was_raised_with(reason):
    refusal = errors.Overloaded("x", reason=reason, retry_after_s=3)
    headers = dict(error_headers(refusal))
    assert headers[b"x-gateway-shed-reason"].decode() == reason.value
    assert headers[b"retry-after"] == b"3"


def test_reasons_of_capacity_and_of_backends_are_their_own():
    shed = [made(each, "x").shed_reason for each in below(Rejected)]
    failed = [each.ending for each in below(errors.UpstreamError)]
    assert len(set(shed)) == len(shed)
    assert len(set(failed)) == len(failed)


@pytest.mark.parametrize("error", [Rejected, *below(Rejected)])
def test_a_client_that_came_again_already_is_not_asked_back_by_its_sdk(error):
    refusal = made(error, "x")
    assert b"x-should-retry" not in dict(error_headers(refusal))
    assert dict(error_headers(refusal, retried=True))[b"x-should-retry"] == b"false"


def test_every_refusal_for_capacity_has_a_code_of_its_own():
    codes = [each.default_code for each in Rejected.__subclasses__()]
    assert None not in codes
    assert len(set(codes)) == len(codes)


def test_only_a_refusal_for_capacity_tells_an_sdk_to_stop():
    assert b"x-should-retry" not in dict(error_headers(errors.BackendBroke("x"), retried=True))


def test_a_configuration_error_never_becomes_a_reply():
    assert not issubclass(ConfigError, GatewayError)
    error = ConfigError(["a: wrong", "b: wrong"])
    assert str(error) == "a: wrong\nb: wrong"


# --- the drawing ----------------------------------------------------------------------------------


def test_the_drawing_names_every_class_and_no_other():
    names = [name for name, _, _ in drawn()]
    assert sorted([*names, "GatewayError"]) == sorted(OF_THE_MODULE)


def test_the_drawing_shows_who_descends_from_whom():
    for name, parent, _ in drawn():
        if name != "ConfigError":
            assert OF_THE_MODULE[name].__base__.__name__ == parent, name


def test_the_drawing_has_the_right_status_type_and_code():
    for name, _, rest in drawn():
        told = re.search(r"\b([45]\d\d)\b(?: +(\w+_error)(?: +(\w+))?)?", rest)
        if told is None:
            continue
        error = OF_THE_MODULE[name]
        assert int(told[1]) == error.status, name
        assert told[2] in (None, error.type), name
        if told[3] is not None:
            assert (None if told[3] == "null" else told[3]) == error.default_code, name
