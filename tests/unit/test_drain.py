"""The end of all requests when the gateway ends."""

import asyncio

from gateway.ingress.drain import announce_stop, end, let_finish


class Counted(set):
    """The requests in progress, and how often they were gone through."""

    looks = 0

    def __iter__(self):
        self.looks += 1
        return super().__iter__()


class Request:
    relay = task = None

    def cancel(self):
        self.task.cancel()


async def request(live, until):
    down = Request()

    async def story():
        try:
            await until.wait()
        finally:
            live.discard(down)

    down.task = asyncio.get_running_loop().create_task(story())
    live.add(down)
    return down


def test_a_thousand_requests_that_end_one_by_one_are_not_gone_through_a_thousand_times():
    async def main():
        live, hurry = Counted(), asyncio.Event()
        ends = [asyncio.Event() for _ in range(1000)]
        for each in ends:
            await request(live, each)
        draining = asyncio.get_running_loop().create_task(let_finish(live, 60, hurry))
        for each in ends:
            await asyncio.sleep(0)
            each.set()
        await draining
        assert not live
        assert live.looks < 10

    asyncio.run(main())


def test_a_second_signal_ends_the_wait_and_the_requests():
    async def main():
        live, hurry = Counted(), asyncio.Event()
        down = await request(live, asyncio.Event())
        draining = asyncio.get_running_loop().create_task(let_finish(live, 60, hurry))
        await asyncio.sleep(0)
        assert not draining.done()
        hurry.set()
        async with asyncio.timeout(5):
            await draining
            await end(live)
        assert down.task.cancelled()

    asyncio.run(main())


def test_a_grace_period_of_nothing_ends_them_at_once():
    async def main():
        live = Counted()
        down = await request(live, asyncio.Event())
        async with asyncio.timeout(5):
            await let_finish(live, 0, asyncio.Event())
            await end(live)
        assert down.task.cancelled()

    asyncio.run(main())


def test_a_second_signal_ends_the_announcement():
    async def main():
        hurry = asyncio.Event()
        announcing = asyncio.get_running_loop().create_task(announce_stop(set(), 60, hurry))
        await asyncio.sleep(0)
        assert not announcing.done()
        hurry.set()
        async with asyncio.timeout(5):
            await announcing

    asyncio.run(main())
