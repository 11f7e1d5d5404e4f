"""The shared store of a gateway that runs alone."""

import pathlib
import re

import pytest

import gateway
from gateway.store.memory import MemoryStore
from gateway.store.scripts import TRY
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


def test_every_command_that_a_script_uses_is_among_those_that_are_tried():
    sources = pathlib.Path(gateway.__file__).parent.rglob("*.py")
    command = re.compile(r"redis\.call\(\s*'([A-Z]+)'")
    used = {name for each in sources for name in command.findall(each.read_text())}
    assert used == set(command.findall(TRY.text))
