"""Large bodies are kept for streams that may go on elsewhere: a copy each, within one budget."""

from gateway.core.types import Call, Dialect, Endpoint
from gateway.ingress.keeping import MOST_BYTES, Keeping

MIB = 2**20


def call(size):
    return Call(Endpoint.MESSAGES, Dialect.MESSAGES, "m", True, bytearray(size), places={})


def test_a_kept_body_outlives_the_one_that_came():
    keeping, came = Keeping(), call(MIB)
    kept = keeping.keep(came)
    came.body.clear()  # its room is given back
    assert len(kept.call.body) == keeping.held_bytes == MIB


def test_all_of_them_keep_to_the_budget():
    keeping, came = Keeping(), call(8 * MIB)
    held = [keeping.keep(came) for _ in range(MOST_BYTES // (8 * MIB))]
    assert all(held)
    assert keeping.held_bytes == MOST_BYTES
    assert keeping.keep(call(1)) is None
    held[0].release()
    assert keeping.keep(call(1)) is not None


def test_a_place_is_given_back_once():
    keeping = Keeping()
    kept = keeping.keep(call(MIB))
    kept.release()
    kept.release()
    assert keeping.held_bytes == 0


def test_a_body_that_nobody_takes_apart_is_not_kept():
    keeping = Keeping()
    assert keeping.keep(call(8 * MIB + 1)) is None
    assert keeping.held_bytes == 0
