"""The keys that replicas share, over a Redis that is only played."""

import pytest

from tests.fakekeyserver import FakeKeyServer
from tests.sharedkeycases import SharedDesk, SharedKeyCases


@pytest.fixture
def desk():
    desk = SharedDesk(FakeKeyServer())
    yield desk
    desk.close()


class TestPlayed(SharedKeyCases):
    def lose(self, desk):
        desk.store.link.forget()

    def lose_records(self, desk):
        desk.store.link.records.clear()

    def plant(self, desk, key_id, text):
        desk.store.link.records[key_id] = text
