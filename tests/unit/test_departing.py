"""How a stream whose token ids must be asked for leaves a backend that is drained."""

import asyncio
from types import SimpleNamespace

import pytest
from msgspec import Raw

from gateway.core.exclusion import Chance
from gateway.core.types import Ask, Caller, Phase, Route
from gateway.counting.ids import Prompt
from gateway.ingress.departing import Departing, Departure
from gateway.ingress.measuring import Measuring
from tests.unit.test_find_ids import TOOLS, Tokenizer
from tests.unit.test_recited import ASKED, FAULT, MESSAGES, RESPONSES, watch_of, written

PIECES = ("On", "ce", " upon", " a", " time")


class Relay:
    """A stream on its way: notes whether it is read, and where it was cut."""

    def __init__(self, watch):
        self.watch = watch
        self.reads, self.error, self.pauses = True, None, 0

    def pause(self):
        self.reads, self.pauses = False, self.pauses + 1

    def let_go(self, error=None):
        if error is not None:
            self.error = error
            assert self.watch.broken(FAULT) == b""
        self.reads = True


class Gate:
    """One that has places, or has none."""

    def __init__(self):
        self.needs = SimpleNamespace(of=lambda *_: None)
        self.has_place, self.taken = True, 0

    def chance(self, ask):
        return Chance.NOW if self.has_place else Chance.LATER

    def enter(self, ask):
        self.taken += self.has_place
        return SimpleNamespace(release=lambda: None) if self.has_place else None


class Scene:
    """A stream at a backend that is drained, and another backend that tells what it is asked for."""

    def __init__(self, path, tokenizer=None, departing=None, **more):
        self.opening, self.frames, self.closing, self.prompt = written(path, PIECES)
        self.watch = watch_of(path, **more)
        self.relay, self.gate = Relay(self.watch), Gate()
        self.tokenizer = tokenizer or Tokenizer(*PIECES)
        self.prompts, self.lost, self.now = 0, [], 100.0
        self.meanwhile = lambda: None  # while somebody is asked for tokens
        self.fails = False
        drained, other = (
            SimpleNamespace(
                id=name,
                phase=phase,
                plain=False,
                revision="",
                models={},
                in_flight=0,
                health=SimpleNamespace(since=0.0),
                chats_take_ids=True,
            )  # fmt: skip
            for name, phase in (("a", Phase.DRAINING), ("b", Phase.READY))
        )
        clock = SimpleNamespace(now=lambda: self.now)
        table = SimpleNamespace(backends=lambda pool: [drained, other])
        counters = SimpleNamespace(
            tokens_of=self.tokens_of, prompt_ids=self.prompt_ids, read_ids=self.read_ids
        )
        self.settings = SimpleNamespace(
            counters=counters,
            going_on={"m": SimpleNamespace(move_after_s=0)},
            patience=SimpleNamespace(client_write_s=60.0),
        )
        retrying = SimpleNamespace(lost=self.note_lost)
        measuring = Measuring(table, self.gate)
        self.departing = departing or Departing(self.gate, measuring, retrying, clock)
        call = self.watch.call
        self.ask = Ask(Route("m", "m", "m"), call, self.watch.asked[1], Caller("k", "n", "t", 0))
        down = SimpleNamespace(record=SimpleNamespace())
        self.departure = Departure(
            self.departing, self.settings, down, self.ask, self.watch, drained, self.relay
        )
        self.watch.feed(self.opening + self.frames[0])

    async def tokens_of(self, text, route, backends):
        assert [each.id for each in backends] == ["b"]
        told = await self.tokenizer.tokens_of(text, route, backends)
        await asyncio.sleep(0)
        self.meanwhile()
        return told

    async def prompt_ids(self, *_):
        return Prompt(await self.read_ids(), {"reasoning_effort": Raw(b'"low"')})

    async def read_ids(self, *_):
        self.prompts += 1
        if self.fails:
            raise OSError("gone")
        return self.prompt

    async def note_lost(self, down, record, backend, ending, asked_at):
        self.lost.append(backend.id)

    def comes(self, number=1):
        """Have the drained backend write more, if it is read."""
        if self.relay.reads and self.relay.error is None:
            self.watch.feed(self.frames[number])

    def ticks(self):
        """Have the clock tick, and whoever works then come to an end."""

        async def tick():
            self.departure.begin()
            for _ in range(20):
                await asyncio.sleep(0)

        asyncio.run(tick())


@pytest.mark.parametrize("path", ASKED)
def test_it_is_cut_behind_what_is_proven(path):
    scene = Scene(path)
    scene.ticks()
    assert scene.relay.error is not None
    assert scene.relay.pauses == 0
    rest, _ = scene.watch.rest(moved=True)
    assert b'"prompt_token_ids"' in rest.body
    assert scene.gate.taken == 1


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("is_read", [False, True])
def test_what_comes_meanwhile_has_it_wait_until_that_is_known_too(path, is_read):
    """Frames are read where many have come."""
    scene = Scene(path)

    def meanwhile():
        scene.comes()
        assert not is_read or scene.watch.trail.pieces

    scene.meanwhile = meanwhile
    scene.ticks()
    assert scene.tokenizer.asked == ["On", "Once"]
    assert scene.relay.error is not None
    assert scene.relay.pauses == 1
    assert scene.relay.reads
    assert scene.prompts == 1
    assert scene.watch.rest(moved=True) is not None


@pytest.mark.parametrize("path", ASKED)
def test_what_is_not_proven_leaves_it_alone(path):
    scene = Scene(path, Tokenizer(*PIECES[1:]))
    scene.watch.feed(scene.frames[1])
    scene.tokenizer = Tokenizer("O", "nce")  # the model cut its text otherwise
    scene.ticks()
    assert (scene.relay.error, scene.relay.pauses, scene.gate.taken) == (None, 0, 0)
    assert scene.watch.barrier is not None
    assert scene.watch.broken(FAULT) == b""  # when it fails, others are asked again
    assert scene.watch.wants_ids


@pytest.mark.parametrize("path", ASKED)
def test_it_is_tried_again_less_and_less_often(path):
    scene = Scene(path)
    scene.prompt = []
    tried = []
    for _ in range(120):
        before = scene.prompts
        scene.ticks()
        if scene.prompts > before:
            tried.append(scene.now)
        scene.now += 0.5
    pauses = [later - before for before, later in zip(tried, tried[1:], strict=False)]
    assert pauses == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("path", ASKED)
def test_a_place_that_is_gone_by_then_leaves_it_alone(path):
    """What was proven meanwhile does not hold any more once it has come further."""
    scene = Scene(path)

    def lose_place():
        scene.gate.has_place = False

    scene.meanwhile = lose_place
    scene.ticks()
    assert (scene.relay.error, scene.relay.pauses) == (None, 0)
    scene.watch.feed(scene.frames[1])
    assert scene.watch.broken(FAULT) == b""
    assert scene.watch.wants_ids
    assert scene.watch.rest() is None


@pytest.mark.parametrize("path", ASKED)
def test_what_was_told_of_its_prompt_is_not_asked_for_again(path):
    scene = Scene(path)

    def lose_place():
        scene.gate.has_place = False

    scene.meanwhile = lose_place
    scene.ticks()
    scene.meanwhile, scene.gate.has_place = lambda: None, True
    scene.now += 1
    scene.ticks()
    assert scene.prompts == 1
    body = scene.watch.rest(moved=True)[0].body
    assert (b'"reasoning_effort":"low"' in body) is (path == MESSAGES)


@pytest.mark.parametrize("path", ASKED)
def test_if_nobody_answers_it_is_read_again(path):
    scene = Scene(path)
    scene.settings.patience.client_write_s = 0.02

    async def tokens_of(text, route, backends):
        if not scene.relay.reads:
            await asyncio.Event().wait()
        scene.comes()
        return await scene.tokenizer.tokens_of(text, route, backends)

    scene.settings.counters.tokens_of = tokens_of

    async def check():
        scene.departure.begin()
        await asyncio.sleep(0)
        while not scene.relay.reads or not scene.relay.pauses:
            await asyncio.sleep(0.001)

    asyncio.run(check())
    assert (scene.relay.error, scene.relay.pauses, scene.gate.taken) == (None, 1, 0)


@pytest.mark.parametrize("path", ASKED)
def test_whoever_closes_it_has_it_read_again(path):
    scene = Scene(path)

    async def tokens_of(text, route, backends):
        if not scene.relay.reads:
            await asyncio.Event().wait()
        scene.comes()
        return await scene.tokenizer.tokens_of(text, route, backends)

    scene.settings.counters.tokens_of = tokens_of

    async def check():
        scene.departure.begin()
        while scene.relay.reads:
            await asyncio.sleep(0)
        scene.departure.close()
        while not scene.relay.reads:
            await asyncio.sleep(0)
        assert scene.departing.has_room

    asyncio.run(check())
    assert scene.relay.error is None


@pytest.mark.parametrize("path", ASKED)
def test_without_a_place_nobody_is_asked(path):
    scene = Scene(path)
    scene.gate.has_place = False
    scene.ticks()
    assert (scene.tokenizer.asked, scene.prompts) == ([], 0)


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("ends", [True, False])
def test_a_text_that_ends_stays(path, ends):
    """All was said, and what it ended by comes next."""
    scene = Scene(path)
    scene.watch.feed(b"".join(scene.frames[1:]))
    if ends:
        scene.watch.feed(scene.closing[: scene.closing.index(b"\n\n") + 2])
    scene.ticks()
    assert (scene.relay.error is None) is ends


@pytest.mark.parametrize("path", ASKED)
def test_where_the_limit_is_reached_nothing_is_left_to_go_on_with(path):
    scene = Scene(path, Tokenizer("O", "n"), limit=2)  # in one frame
    scene.ticks()
    assert scene.relay.error is None


def test_a_backend_that_fails_as_it_reads_the_prompt_is_noted_and_no_other_asked():
    scene = Scene(RESPONSES)
    scene.fails = True
    scene.ticks()
    assert scene.lost == ["b"]
    scene.now += 1000
    scene.ticks()
    assert (scene.prompts, scene.relay.error) == (1, None)


@pytest.mark.parametrize("path", ASKED)
def test_a_tool_that_may_have_begun_waits(path):
    scene = Scene(path, Tokenizer(*PIECES, "On<"), tools=TOOLS[path])
    scene.ticks()
    assert scene.relay.error is None
    scene.watch.feed(scene.frames[1])
    scene.now += 1
    scene.ticks()
    assert scene.relay.error is not None


@pytest.mark.parametrize("path", [MESSAGES])
def test_some_are_asked_about_at_a_time(path):
    scenes = [Scene(path)]
    scenes += [Scene(path, departing=scenes[0].departing) for _ in range(19)]

    async def check():
        for each in scenes:
            each.departure.begin()
        for _ in range(20):
            await asyncio.sleep(0)
        assert sum(each.prompts for each in scenes) == 16
        for each in scenes:
            each.departure.begin()
        for _ in range(20):
            await asyncio.sleep(0)

    asyncio.run(check())
    assert all(each.prompts == 1 for each in scenes)
