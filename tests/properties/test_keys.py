"""No bytes but a key's own ever let anybody in, and nothing but a refusal comes of them."""

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.keys import KeyRing
from gateway.access.records import KeyRecord, Secret
from gateway.access.secret import checksum
from gateway.core.errors import AccessError

PEPPER = hashlib.sha256(b"pepper").digest()
BODY = "gw_abcdefgh_" + "s" * 43
KEY = f"{BODY}_{checksum(BODY.encode())}".encode()
RING = KeyRing(
    [
        KeyRecord(
            id="abcdefgh",
            name="ci",
            tenant="ci",
            secrets=(Secret(hmac.digest(PEPPER, KEY, "sha256")),),
        )
    ],
    PEPPER,
)

headers = (
    st.none() | st.binary(max_size=80) | st.binary(max_size=80).map(lambda it: b"Bearer " + it)
)


@given(headers, headers, headers)
def test_arbitrary_headers_are_refused_and_nothing_else_happens(authorization, x_api_key, api_key):
    with pytest.raises(AccessError):
        RING.authenticate(authorization, x_api_key, api_key, 0.0)


@given(st.integers(0, len(KEY) - 1), st.integers(0, 255))
def test_a_key_with_one_byte_changed_lets_nobody_in(at, byte):
    changed = KEY[:at] + bytes([byte]) + KEY[at + 1 :]
    if changed == KEY:
        assert RING.authenticate(None, KEY, None, 0.0).key_id == "abcdefgh"
        return
    with pytest.raises(AccessError) as caught:
        RING.authenticate(None, changed, None, 0.0)
    assert "sssss" not in caught.value.message


@given(st.text(alphabet="abcdefgh_-XYZ0189", max_size=60), st.integers(0, 60), st.characters())
def test_check_characters_notice_any_one_changed_character(text, at, other):
    changed = text[:at] + other + text[at + 1 :]
    if changed != text and len(changed) == len(text) and other.isascii():
        assert checksum(changed.encode()) != checksum(text.encode())
