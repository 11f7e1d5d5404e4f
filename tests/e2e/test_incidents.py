"""Ten incidents: the program `status`, the dashboard in Chromium and an alert of Prometheus each name the cause in time."""

import pytest

from tests.incidents.lookouts import lookouts
from tests.incidents.report import REPORT, essence, row, rows_of
from tests.incidents.scenes import INCIDENTS, WITHIN_S
from tests.stories.support import story

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]
LATE_S = 5.0  # one scrape may be late on a busy machine


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda each: each.scene.__name__)
def test_the_cause_is_named_wherever_operators_look_and_the_report_has_the_sentences(incident):
    async def check():
        async with incident.scene() as scene, lookouts(scene.world.admin_url) as looking:
            await scene.plant()
            told = await looking.hear(incident, WITHIN_S + LATE_S)
        assert told.status.after_s <= WITHIN_S
        assert told.dashboard.after_s <= WITHIN_S
        assert essence(row(incident, told)) == essence(rows_of(REPORT)[incident.name])

    story(check, seconds=110.0)()
