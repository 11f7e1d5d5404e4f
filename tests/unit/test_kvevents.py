"""vLLM's KV events as they come over the wire, and where they come from."""

import msgspec
import pytest

from gateway.wire.kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Garbled,
    parse_batch,
    published,
    replay_from,
    replayed,
    time_of,
)
from gateway.wire.kvsources import Source, parse_sources, source_of

STORED = {
    "type": "BlockStored",
    "block_hashes": [2**64 - 1],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 2,
    "lora_id": 1,
    "medium": "GPU",
    "lora_name": "a",
    "extra_keys": [["a", "salt"]],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}
END = b"\xff" * 8


def batch(*events, at=1.5):
    return msgspec.msgpack.encode([at, list(events), 0])


def test_maps_and_arrays_say_the_same():
    array = list(STORED.values())
    as_map, as_array = parse_batch(batch(STORED, array)).events
    assert as_map == as_array
    assert as_map.block_hashes == [2**64 - 1]
    assert as_map.tells_keys


def test_hashes_may_be_bytes():
    events = parse_batch(batch(["BlockRemoved", [b"h" * 32], "GPU"], ["AllBlocksCleared"])).events
    assert events == [BlockRemoved([b"h" * 32], "GPU"), AllBlocksCleared()]


@pytest.mark.parametrize("fields", [6, 7, 8])
def test_an_array_of_an_older_engine_ends_before_the_keys_and_says_so(fields):
    (event,) = parse_batch(batch(list(STORED.values())[:fields])).events
    assert isinstance(event, BlockStored)
    assert not event.tells_keys
    assert event.lora_id == 1


def test_what_newer_engines_add_is_passed_over():
    found = parse_batch(batch({**STORED, "later": 1}, {"type": "BlocksMoved"}, ["Other", 1], []))
    assert len(found.events) == 1
    assert found.strange == 3


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x93",
        b"\x91" * 100_000,
        msgspec.msgpack.encode({}),
        batch({**STORED, "token_ids": [2**32]}),
        batch({**STORED, "block_size": 0}),
        batch({"type": "BlockStored"}),
        batch(["BlockStored", 1]),
        batch(1),
    ],
    ids=range(9),
)
def test_what_is_no_batch_is_garbled(payload):
    with pytest.raises(Garbled):
        parse_batch(payload)


def test_the_time_of_a_batch_is_read_alone():
    assert time_of(batch(1, at=7.25)) == 7.25
    assert time_of(b"") is None


def test_frames():
    assert published([b"topic", b"\0" * 7 + b"\5", b"x"]) == (5, b"x")
    assert replayed([b"", b"\0" * 7 + b"\5", b"x"]) == (5, b"x")  # older engines
    assert replayed([b"", b"topic", b"\0" * 7 + b"\5", b"x"]) == (5, b"x")
    assert replayed([b"", END, b""]) is replayed([b"", b"", END, b""]) is None
    assert replay_from(258) == (b"", b"\0" * 6 + b"\1\2")
    for frames in ([], [b""], [b"", b"short", b""], [b""] * 4):
        with pytest.raises(Garbled):
            published(frames)
    for frames in ([], [b""] * 5, [b"x", b"", END, b""], [b"", b"", b"short", b""]):
        with pytest.raises(Garbled):
            replayed(frames)


ON = {"enable_kv_cache_events": True}


@pytest.mark.parametrize(
    ("config", "host", "rank", "source"),
    [
        (ON, "10.0.0.5", 0, Source("tcp://10.0.0.5:5557")),
        (ON, None, 2, Source("tcp://127.0.0.1:5559")),
        (ON, "fd00::5", 0, Source("tcp://[fd00::5]:5557")),
        (
            {**ON, "endpoint": "tcp://0.0.0.0:7000", "replay_endpoint": "tcp://*:7100"},
            "h",
            1,
            Source("tcp://h:7001", "tcp://h:7101"),
        ),
        ({**ON, "endpoint": "tcp://10.1.1.1:40123"}, "h", 0, Source("tcp://10.1.1.1:40123")),
        ({**ON, "endpoint": "ipc:///run/e"}, None, 0, Source("ipc:///run/e")),
        ({**ON, "endpoint": "ipc:///run/e"}, "h", 0, None),  # on another machine
        ({**ON, "endpoint": "inproc://cache"}, None, 0, None),
        ({**ON, "endpoint": "tcp://*:65535"}, None, 1, None),
        ({**ON, "endpoint": "tcp://*:0"}, None, 0, None),  # only the server knows the port
        ({**ON, "publisher": "null"}, None, 0, None),
        ({**ON, "publisher": None}, None, 0, Source("tcp://127.0.0.1:5557")),
        ({}, None, 0, None),
    ],
)
def test_a_source_is_what_its_configuration_says(config, host, rank, source):
    assert source_of(config, host, rank) == source


def test_the_sources_that_a_server_tells_have_their_ranks_ports_already():
    page = msgspec.json.encode(
        {"1": {**ON, "endpoint": "tcp://*:5558"}, "0": {**ON, "endpoint": "tcp://*:5557"}}
    )
    assert parse_sources(page, "h") == {0: Source("tcp://h:5557"), 1: Source("tcp://h:5558")}
    assert parse_sources(b"{}", "h") == {}
    assert parse_sources(b'{"detail":"Not Found"}', "h") is None
    assert parse_sources(b"<html>", "h") is None
