"""Who may hold how much of the room for request bodies."""

import asyncio
import socket
from types import SimpleNamespace

import pytest

from gateway.config.limits import LimitsConfig, TimeoutsConfig
from gateway.core.asked import Caller
from gateway.core.errors import BodyTooLarge, Overloaded, TooManyWaiting
from gateway.ingress.bodies import Bodies
from gateway.ingress.body import Body
from gateway.ingress.upload import Upload
from gateway.wire.calls import ENDPOINTS
from gateway.wire.forms import FormReader
from gateway.wire.small import SMALL_BODY_BYTES
from tests.gatehouse import held, passes
from tests.uploads import held_bytes

MIB = 1 << 20
LIMITS = LimitsConfig(bodies="8MiB", max_body="4MiB")


async def waits(bodies, key, size, *, seconds=10.0):
    """Ask for room; return the task once it waits, or has it."""
    task = asyncio.get_running_loop().create_task(
        bodies.take(key, size and size * MIB, LIMITS, seconds)
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


def scenario(test):
    def run():
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


@scenario
async def test_one_key_alone_holds_half_and_others_have_the_rest():
    bodies = Bodies()
    for _ in range(4):
        assert (await waits(bodies, "a", 1)).done()
    mine, theirs = await waits(bodies, "a", 1), await waits(bodies, "b", 2)
    assert not mine.done()
    assert theirs.done()
    mine.cancel()


@scenario
async def test_one_body_always_fits_a_key_that_holds_nothing():
    bodies = Bodies()
    held = await bodies.take("a", 4 * MIB, LIMITS, 1.0)
    assert (await waits(bodies, "b", 4)).done()
    waiting = await waits(bodies, "c", 4)
    assert not waiting.done()
    held.release()
    await waiting
    assert bodies.held_bytes == 8 * MIB


@scenario
async def test_who_waits_longest_comes_first_and_smaller_ones_do_not_pass():
    bodies = Bodies()
    holds = [await bodies.take(key, 2 * MIB, LIMITS, 1.0) for key in "abcd"]
    large, small = await waits(bodies, "e", 4), await waits(bodies, "f", 1)
    holds[0].release()
    await asyncio.sleep(0)
    assert not small.done()
    holds[1].release()
    await large
    assert not small.done()
    holds[2].release()
    await small


@scenario
async def test_what_a_body_did_not_need_is_given_to_others():
    bodies = Bodies()
    first, _ = (
        await bodies.take("a", 4 * MIB, LIMITS, 1.0),
        await bodies.take("b", 4 * MIB, LIMITS, 1.0),
    )
    waiting = await waits(bodies, "c", 3)
    first.shrink(1 * MIB)
    await waiting
    first.release()
    first.release()
    assert bodies.held_bytes == 7 * MIB


@scenario
async def test_a_wait_that_is_cancelled_or_too_long_leaves_nothing():
    bodies = Bodies()
    held = [await bodies.take(key, 4 * MIB, LIMITS, 1.0) for key in "ab"]
    cancelled = await waits(bodies, "c", 1)
    cancelled.cancel()
    with pytest.raises(Overloaded) as full:
        await bodies.take("c", 1 * MIB, LIMITS, 0.01)
    with pytest.raises(TooManyWaiting) as own:
        await bodies.take("a", 1 * MIB, LIMITS, 0.01)
    assert (full.value.status, own.value.status) == (503, 429)
    assert full.value.retry_after_s > 0
    for each in held:
        each.release()
    assert bodies.held_bytes == 0
    assert (await waits(bodies, "a", 4)).done()


@scenario
async def test_a_wait_that_is_cancelled_just_as_it_is_let_in_gives_its_room_back():
    bodies = Bodies()
    held = [await bodies.take(key, 4 * MIB, LIMITS, 1.0) for key in "ab"]
    waiter = await waits(bodies, "c", 1)
    held[0].release()  # lets it in, but its task has not run yet
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    held[1].release()
    assert bodies.held_bytes == 0


@scenario
async def test_a_body_is_emptied_when_its_room_is_given_back():
    bodies = Bodies()
    hold = await bodies.take("a", MIB, LIMITS, 1.0)
    hold.body = body = bytearray(MIB)
    with memoryview(body):
        hold.release()  # it is still being sent: whoever sends it lets go of it
    assert len(body) == MIB
    hold = await bodies.take("a", MIB, LIMITS, 1.0)
    hold.body = body
    hold.release()
    assert len(body) == 0
    assert bodies.held_bytes == 0


@scenario
async def test_a_body_that_tells_no_length_counts_little_and_is_let_in_where_a_large_one_fits():
    bodies = Bodies()
    holds = [await bodies.take(key, None, LIMITS, 1.0) for key in "aabc"]
    assert bodies.held_bytes == 4 * MIB
    late = await waits(bodies, "d", None)
    assert late.done()
    assert not (await waits(bodies, "e", None)).done()  # 5 of 8 MiB are held, and it may need 4
    holds[0].release()
    await asyncio.sleep(0)
    assert bodies.held_bytes == 5 * MIB


@scenario
async def test_a_longer_body_waits_for_its_room_before_all_that_is_new():
    bodies = Bodies()
    growing = await bodies.take("a", None, LIMITS, 1.0)
    held = [await bodies.take(key, 3 * MIB, LIMITS, 1.0) for key in "bc"]
    new = await waits(bodies, "d", 2)
    wider = asyncio.get_running_loop().create_task(bodies.widen(growing, 4 * MIB, 1.0))
    await asyncio.sleep(0)
    held[0].release()
    await wider
    assert (growing.size, new.done()) == (4 * MIB, False)
    growing.release()
    await new


@scenario
async def test_a_body_that_may_not_grow_in_time_is_refused_and_holds_what_it_held():
    bodies = Bodies()
    growing = await bodies.take("a", None, LIMITS, 1.0)
    held = [await bodies.take(key, 3 * MIB, LIMITS, 1.0) for key in "bc"]
    with pytest.raises(Overloaded):
        await bodies.widen(growing, 4 * MIB, 0.01)
    assert bodies.held_bytes == 7 * MIB
    for each in (growing, *held):
        each.release()
    assert bodies.held_bytes == 0


@scenario
async def test_a_body_that_is_too_large_is_refused_at_once_though_it_has_not_ended():
    body = Body()
    assert await reads(body, limit_bytes=MIB, first=bytes(SMALL_BODY_BYTES + 1)) is None
    assert await body.next_part() is not None
    body.on_data(bytes(MIB))
    with pytest.raises(BodyTooLarge):
        await body.next_part()


async def reads(body, *, limit_bytes, first):
    """Begin to read a body in chunks, of which the first comes at once."""
    asyncio.get_running_loop().call_soon(body.on_data, first)
    return await body.read(limit_bytes, 5.0, None)


class Sent:
    """A body in chunks, of which its client sends more whenever it is read."""

    content_type, told, hold = b"application/json", None, None

    def __init__(self, text):
        self.body, self.spec = Body(), ENDPOINTS[b"/v1/chat/completions"]
        self.text, self.at, self.paused = text, 0, False

    def pause_reading(self):
        self.paused = not self.body.complete

    def resume_reading(self):
        self.paused = False

    async def read_body(self, limit, timeout_s):
        return await self.body.read(limit, timeout_s, self.told)

    def sends(self):
        if not self.paused and self.at < len(self.text):
            self.body.on_data(self.text[self.at : self.at + 65_536])
            self.at += 65_536
            if self.at >= len(self.text):
                self.body.on_end()

    @property
    def held_bytes(self):
        return sum(map(len, self.body._parts))


def test_bodies_of_unknown_length_hold_no_more_than_has_room_while_others_are_read():
    settings = SimpleNamespace(
        limits=LimitsConfig(bodies="16MiB", max_body="4MiB"), timeouts=TimeoutsConfig()
    )
    message = b'{"role":"user","content":"%b"}' % (b"x" * 40)
    long = b'{"role":"user","content":"%b"}' % (b"y" * 2_500_000)
    text = b'{"model":"m","messages":[%b]}' % b",".join([*[message] * 15_000, long])
    catalog = SimpleNamespace(admit=lambda model, caller: None)

    async def read():
        bodies, sent, most = Bodies(), [Sent(text) for _ in range(20)], 0

        async def one(each, number):
            caller = Caller(f"k{number}", "k", f"t{number}")
            await bodies.read_call(each, caller, settings, lambda: catalog)
            each.body.take()
            each.hold.release()

        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(one(each, at)) for at, each in enumerate(sent)]
            while not all(each.done() for each in reading):
                for each in sent:
                    each.sends()
                held_bytes = sum(each.held_bytes for each in sent)
                most = max(most, held_bytes - bodies.held_bytes)
                await asyncio.sleep(0)
        return most

    assert asyncio.run(read()) <= 20 * 3 * 65_536  # 32 MB before; a few reads of each


class Form:
    """A form whose model stands behind its file, of which the client sends more whenever it is read."""

    hold = body = None
    content_type = b"multipart/form-data; boundary=b"
    spec = ENDPOINTS[b"/v1/audio/transcriptions"]

    def __init__(self, size):
        head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        model = b'\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
        self.text, self.at, self.paused = head + b"x" * size + model, 0, False

    def open_upload(self, limit_bytes, timeout_s):
        self.upload = Upload(
            FormReader(self.content_type), self, self, content_length=len(self.text),
            limit_bytes=limit_bytes, timeout_s=timeout_s,
        )  # fmt: skip
        return self.upload

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False

    def is_closing(self):
        return False

    def get_extra_info(self, name):
        return self.socket

    def sends(self):
        if not self.paused and self.at < len(self.text):
            self.upload.on_data(self.text[self.at : self.at + 65_536])
            self.at += 65_536


def test_forms_that_are_held_until_their_model_comes_need_room_too():
    settings = SimpleNamespace(
        limits=LimitsConfig(bodies="8MiB", max_body="4MiB", max_audio_body="4MiB"),
        timeouts=TimeoutsConfig(),
    )

    async def read():
        bodies, sent, most = Bodies(), [Form(3 * MIB) for _ in range(8)], 0

        async def one(each, number):
            caller = Caller(f"k{number}", "k", f"t{number}")
            call = await bodies.read_call(each, caller, settings, lambda: None)
            each.hold.release()
            each.upload.close()
            return call.model

        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(one(each, at)) for at, each in enumerate(sent)]
            await asyncio.sleep(0)
            while not all(each.done() for each in reading):
                for each in sent:
                    each.sends()
                most = max(most, sum(held_bytes(each.upload) for each in sent))
                await asyncio.sleep(0)
        return most, {each.result() for each in reading}, bodies.held_bytes

    most, models, left = asyncio.run(read())
    assert models == {"m"}
    assert left == 0
    assert most <= 8 * MIB + 8 * 65_536


@held
async def test_the_time_of_a_form_stands_still_while_it_waits_for_room():
    settings = SimpleNamespace(
        limits=LimitsConfig(bodies="8MiB", max_body="4MiB", max_audio_body="4MiB"),
        timeouts=TimeoutsConfig(body="60s"),
    )
    bodies, form = Bodies(), Form(3 * MIB)
    first, _ = [await bodies.take(key, 4 * MIB, LIMITS, 1.0) for key in "ab"]
    form.socket, client = socket.socketpair()
    with form.socket, client:
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(
                bodies.read_call(form, Caller("k", "k", "t"), settings, lambda: None)
            )
            await passes(50.0)
            assert form.paused
            first.release()
            while not reading.done():  # its client takes 48 s to send it
                form.sends()
                await passes(1.0)
        assert reading.result().model == "m"
        form.hold.release()
        form.upload.close()
