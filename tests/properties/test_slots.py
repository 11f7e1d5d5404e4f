from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gateway.config.models import Config
from gateway.core.types import LoadSample, Phase, Scraped
from gateway.pools.table import PoolTable

URLS = [f"http://127.0.0.1:{port}" for port in (8001, 8002, 8003)]
IDS = st.sampled_from(["m/b1", "m/b2"])


class HeldClock:
    def now(self):
        return 0.0

    def wall(self):
        return 0.0


class Slots(RuleBasedStateMachine):
    """Take, release, scrape and reload in any order, beside a list of who holds what."""

    slots = Bundle("slots")

    def __init__(self):
        super().__init__()
        self.table = PoolTable(HeldClock())
        self.reload(URLS[:2])
        self.seen = set(self.table)
        self.held = []

    def reload(self, urls):
        backends = {"m": {"backends": list(urls)}}
        self.table.apply(Config.model_validate({"pools": backends}).pools)

    @rule(target=slots, backend_id=IDS)
    def take(self, backend_id):
        backend = self.table.get(backend_id)
        if backend is None:
            return None
        slot = self.table.take(backend_id, 0.0)
        self.held.append([slot, backend, True])
        return slot

    @rule(slot=slots)
    def release_maybe_again(self, slot):
        self.release(slot)

    @rule(slot=consumes(slots))
    def release_for_the_last_time(self, slot):
        self.release(slot)

    def release(self, slot):
        if slot is None:
            return
        slot.release()
        self.held = [entry for entry in self.held if entry[0] is not slot]

    @rule(backend_id=IDS, running=st.integers(0, 5))
    def scrape(self, backend_id, running):
        backend = self.table.get(backend_id)
        self.table.observe(backend_id, Scraped(LoadSample(0.0, running, 0, 0.0)))
        for entry in self.held:
            if entry[1] is backend:
                entry[2] = False

    @rule(urls=st.lists(st.sampled_from(URLS), min_size=1, max_size=2, unique=True))
    def change_the_configuration(self, urls):
        self.reload(urls)
        self.seen |= set(self.table)

    @invariant()
    def every_backend_counts_exactly_its_held_slots(self):
        for backend in self.seen:
            mine = [entry for entry in self.held if entry[1] is backend]
            assert backend.in_flight == len(mine)
            assert backend.since_scrape == sum(fresh for _, _, fresh in mine)

    @invariant()
    def who_left_is_draining_while_held_and_stopped_after(self):
        members = set(self.table)
        for backend in self.seen - members:
            expected = Phase.DRAINING if backend.in_flight else Phase.STOPPED
            assert backend.phase is expected
            assert (backend in self.table.leaving()) == bool(backend.in_flight)

    def teardown(self):
        for slot, _, _ in list(self.held):
            slot.release()
        assert all(backend.in_flight == backend.since_scrape == 0 for backend in self.seen)
        assert not self.table.leaving()


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40)
