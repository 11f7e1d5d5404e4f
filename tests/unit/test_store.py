"""The shared store of a gateway that runs alone."""

import pytest

from gateway.store.memory import MemoryStore
from tests.storecases import Desk, StoreCases


@pytest.fixture
def desk():
    desk = Desk(MemoryStore)
    yield desk
    desk.close()


class TestMemory(StoreCases):
    def test_it_forgets_the_oldest_claims_first(self, desk):
        for number in range(4097):
            assert desk.claim_restart("p/a", str(number))
        assert not desk.claim_restart("p/a", "1")
        assert desk.claim_restart("p/a", "0")
