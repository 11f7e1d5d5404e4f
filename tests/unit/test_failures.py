"""Wrong keys of one address are slowed; memory is bounded, and nothing but wrong keys counts."""

import pytest

from gateway.access.failures import ADDRESSES, FailedKeys
from gateway.core.errors import AccessError, MissingKey, TooManyFailedKeys


class Wrong:
    def __init__(self, per_minute=3):
        self.now = 1000.0
        self.failed = FailedKeys(per_minute, lambda: self.now)

    def judge(self, address="192.0.2.1", error=None):
        return self.failed.judge(error or AccessError("wrong"), address)


def test_the_first_ones_are_told_why_and_the_next_are_told_when_to_come_again():
    wrong = Wrong()
    for _ in range(3):
        error = AccessError("wrong")
        assert wrong.judge(error=error) is error
    limited = wrong.judge()
    assert isinstance(limited, TooManyFailedKeys)
    assert (limited.status, limited.code) == (429, "too_many_failed_keys")
    assert 0 < limited.retry_after_s <= 20


def test_a_limited_reply_is_the_same_whatever_was_wrong():
    wrong = Wrong()
    for _ in range(3):
        wrong.judge()
    told = [
        wrong.judge(error=each) for each in (AccessError("revoked yesterday"), MissingKey("none"))
    ]
    assert len({(each.status, each.code, each.message) for each in told}) == 1


def test_one_more_is_told_after_each_share_of_a_minute_however_many_came_meanwhile():
    wrong = Wrong()
    for _ in range(500):
        wrong.judge()
    assert wrong.judge().status == 429
    wrong.now += wrong.judge().retry_after_s
    assert wrong.judge().status == 401
    assert wrong.judge().status == 429
    wrong.now += 60
    assert [wrong.judge().status for _ in range(4)] == [401, 401, 401, 429]


def test_addresses_are_counted_apart():
    wrong = Wrong()
    for _ in range(4):
        wrong.judge("192.0.2.1")
    assert wrong.judge("192.0.2.2").status == 401
    assert wrong.judge("192.0.2.1").status == 429


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        (None, None, True),  # a UNIX socket: whoever connects is a proxy on this machine
    ],
)
def test_what_one_client_surely_has_is_counted_together(one, other, same):
    wrong = Wrong()
    for _ in range(3):
        wrong.judge(one)
    assert (wrong.judge(other).status == 429) is same


def test_memory_is_bounded_and_the_address_that_failed_longest_ago_is_forgotten():
    wrong = Wrong()
    for _ in range(3):
        wrong.judge("10.0.0.1")
        wrong.judge("10.0.0.2")
    for number in range(ADDRESSES - 1):
        wrong.judge(f"10.{1 + number // 65536}.{number // 256 % 256}.{number % 256}")
    assert wrong.judge("10.0.0.2").status == 429
    assert wrong.judge("10.0.0.1").status == 401
