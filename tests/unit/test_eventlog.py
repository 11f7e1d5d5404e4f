"""Events outlive the gateway that told them."""

import resource

from gateway.core.events import Event, EventKind, Events
from gateway.heal.eventlog import MOST_BYTES, keep_events

FILE = "events.jsonl"


def event(number):
    return Event(float(number), EventKind.RESTART, "m/b1", "frozen", f"number {number}")


def followed(folder, most_bytes=MOST_BYTES):
    events = Events()
    keep_events(folder, events, most_bytes)
    return events


def details(events):
    return [each.detail for each in events.newest()]


def test_the_next_gateway_knows_what_was_done(tmp_path):
    events = followed(tmp_path / "state")
    for number in (1, 2):
        events.tell(event(number))
    again = followed(tmp_path / "state")
    assert [*again.newest()] == [event(2), event(1)]
    again.tell(event(3))
    assert details(followed(tmp_path / "state")) == ["number 3", "number 2", "number 1"]
    assert (tmp_path / "state" / FILE).stat().st_mode & 0o777 == 0o600


def test_what_is_recalled_is_not_told_or_written_again(tmp_path):
    followed(tmp_path).tell(event(1))
    heard = []
    events = Events()
    events.on_event.append(heard.append)
    keep_events(tmp_path, events)
    assert heard == []
    assert (tmp_path / FILE).read_bytes().count(b"number 1") == 1


def test_a_line_that_was_cut_costs_no_other(tmp_path):
    events = followed(tmp_path)
    for number in (1, 2):
        events.tell(event(number))
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(b"\xff\n{}\n" + whole[:-20])
    again = followed(tmp_path)
    assert details(again) == ["number 1"]
    again.tell(event(3))
    assert details(followed(tmp_path)) == ["number 3", "number 1"]


def test_a_line_that_the_disk_had_no_room_for_costs_no_other(tmp_path):
    events = followed(tmp_path)
    events.tell(event(1))
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / FILE).stat().st_size + 10, hard))
    try:
        events.tell(event(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    events.tell(event(3))
    assert details(followed(tmp_path)) == ["number 3", "number 1"]


def test_the_files_stay_small_and_the_newest_are_kept(tmp_path):
    events = followed(tmp_path, 1000)
    for number in range(100):
        events.tell(event(number))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2200
    kept = details(followed(tmp_path))
    assert kept == [f"number {number}" for number in range(99, 99 - len(kept), -1)]
    assert len(kept) >= 8


def test_a_folder_that_cannot_be_written_is_told_once_and_loses_nothing_here(tmp_path, caplog):
    (tmp_path / "state").write_text("a file where the folder should be")
    events = followed(tmp_path / "state")
    for number in (1, 2):
        events.tell(event(number))
    assert details(events) == ["number 2", "number 1"]
    assert caplog.text.count("when this gateway ends") == 1
