"""Numbers and switches as vLLM's request models read them (pydantic's lax mode)."""

import pytest

from gateway.core.errors import RequestError
from gateway.wire.calls import ENDPOINTS, parse_call
from gateway.wire.large import completed
from gateway.wire.lax import NotReadable, lax_bool, lax_int
from gateway.wire.scan import BodyScan

INTEGERS = [
    (7, 7), (7.0, 7), ("7", 7), ("7.0", 7), ("7.00", 7), (" 7 ", 7), ("\t7\n", 7), ("+7", 7), ("-7", -7),
    ("1_000", 1000), ("007", 7), ("1_0.0", 10), ("\u00a07", 7), (True, 1), (False, 0), (-0.0, 0), (2**62, 2**62),
]  # fmt: skip
NO_INTEGERS = [
    7.5, "7.5", "7.", ".7", "- 7", "_1", "1__0", "0x10", "1e3", "\uff17", "", " ", "true", "null", "+", "1 2", "7.0_0",
    "7\0", None, [], {}, float("inf"), float("nan"), 1e300, 2**63, str(2**64), "0" * 100 + "7",
]  # fmt: skip
TRUE = [True, 1, 1.0, "1", "t", "T", "true", "True", "TRUE", "y", "yes", "on", "ON"]
FALSE = [False, 0, 0.0, -0.0, "0", "f", "false", "False", "n", "no", "off", "OFF"]
NO_BOOL = [2, -1, 0.5, "2", "", " true", "1.0", "0.0", "null", None, [], {}]


@pytest.mark.parametrize(("value", "read"), INTEGERS)
def test_integers(value, read):
    found = lax_int(value)
    assert (found, type(found)) == (read, int)


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_what_is_no_integer(value):
    with pytest.raises(NotReadable):
        lax_int(value)


@pytest.mark.parametrize("value", TRUE + FALSE, ids=repr)
def test_switches(value):
    assert lax_bool(value) is (value in TRUE)


@pytest.mark.parametrize("value", NO_BOOL, ids=repr)
def test_what_is_no_switch(value):
    with pytest.raises(NotReadable):
        lax_bool(value)


@pytest.mark.parametrize("odd", ["[1.0,2]", '["7",8]', "[true,2]", "[1e0]"])
def test_token_ids_of_a_large_body_are_integers_or_refused_so_that_none_goes_uncounted(odd):
    scan = BodyScan()
    scan.feed(b'{"model":"m","prompt":[%b,[%b0]]}' % (odd.encode(), b"1," * 50_000))
    scan.end()
    while scan.step():
        pass
    call = parse_call(ENDPOINTS[b"/v1/completions"], scan.skim())
    assert call.prompt_token_ids is not None
    with pytest.raises(RequestError) as caught:
        completed(call, scan)
    assert (caught.value.param, caught.value.code) == ("prompt", "invalid_type")


@pytest.mark.parametrize(
    ("path", "own", "other"),
    [("/v1/embeddings", b"input", b"prompt"), ("/v1/completions", b"prompt", b"input")],
)
def test_token_ids_of_a_field_that_the_endpoint_does_not_read_do_not_count(path, own, other):
    scan = BodyScan()
    scan.feed(b'{"model":"m","%b":[1,2,3],"%b":[%b0]}' % (other, own, b"1," * 50_000))
    scan.end()
    while scan.step():
        pass
    call = completed(parse_call(ENDPOINTS[path.encode()], scan.skim()), scan)
    assert call.prompt_token_ids == 50_001
