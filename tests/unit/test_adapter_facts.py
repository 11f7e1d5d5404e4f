"""What is known of adapters: limits of servers, sizes of files, what outlives a gateway, what a new server holds."""

import json
import textwrap

import pytest

from gateway.adapters.change import Change, mixes
from gateway.adapters.memory import Memory, Order
from gateway.adapters.placement import Move
from gateway.adapters.weights import Size, sizes
from gateway.config.launched import AdapterLimits, adapter_limits, adapters_at
from gateway.config.load import check_file
from gateway.config.models import BackendConfig, Config
from gateway.pools.table import Backend
from gateway.watch.adapters import wanted


def launched(*command, **args):
    launch = {"command": list(command), "port": 8001, "args": args}
    return BackendConfig.model_validate({"name": "b1", "launch": launch})


@pytest.mark.parametrize(
    ("backend", "limits"),
    [
        (launched("vllm", "serve", "m"), AdapterLimits(0, None, "its command line has no --enable-lora")),
        (launched("./start.sh"), AdapterLimits()),
        (launched("vllm", "serve", "m", "--enable-lora"), AdapterLimits(1, 16)),
        (launched("vllm", "serve", "m", "--enable-lora", "--max-loras", "4"), AdapterLimits(4, 16)),
        (
            launched("vllm", "serve", "m", **{"enable-lora": True, "max-loras": 4, "max-cpu-loras": 32, "max-lora-rank": 64}),
            AdapterLimits(32, 64),
        ),
        (BackendConfig.model_validate({"url": "http://h:1"}), AdapterLimits()),
        (BackendConfig.model_validate({"url": "http://h:1", "max_cpu_loras": 8}), AdapterLimits(8)),
    ],
)  # fmt: skip
def test_how_many_adapters_a_server_keeps_is_read_from_its_command_line_or_settings(
    backend, limits
):
    assert adapter_limits(backend) == limits


def test_what_a_server_loads_by_itself_is_on_its_command_line():
    backend = launched(
        "vllm", "serve", "m", "--enable-lora", "--lora-modules", "a=/a", '{"name": "b"}'
    )
    assert adapters_at(backend.launch) == ["a", "b"]


def test_sizes_are_those_of_the_files_that_can_be_read(tmp_path):
    for name, content in (("good", {"r": 64}), ("odd", ["r"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(content))
    (tmp_path / "good" / "adapter_model.safetensors").write_bytes(bytes(1000))
    paths = [str(tmp_path / name) for name in ("good", "odd", "none")]
    assert sizes(paths) == {paths[0]: Size(64, 1000)}


def test_what_was_loaded_and_ordered_is_known_to_the_next_gateway(tmp_path):
    memory = Memory(tmp_path)
    memory.note("m/b1", "sql")
    memory.note("m/b1", "fr")
    memory.only("m/b1", ["fr"], 0.0)
    memory.order("m/b2", "sql", Order(keep=True, path="/x"))
    memory.order("m/b2", "fr", Order(keep=False))
    memory.order("m/b2", "fr", None)
    again = Memory(tmp_path)
    assert again.loaded("m/b1") == {"fr"}
    assert again.orders("m/b2") == {"sql": Order(keep=True, path="/x")}
    assert again.orders("m/b1") == {}


def test_orders_that_cannot_be_saved_say_so(tmp_path):
    (tmp_path / "file").write_text("")
    memory = Memory(tmp_path / "file")
    memory.order("m/b1", "sql", Order(keep=True))
    assert not memory.saved


def test_a_new_server_holds_all_that_fits_else_what_is_pinned_there_and_was_held():
    def site(most, out=()):
        adapters = [{"name": name, "path": f"/{name}"} for name in "abcd"]
        adapters[3]["pin"] = ["b1"]
        backend = {"url": "http://h:1", "max_cpu_loras": most}
        pool = Config.model_validate(
            {"pools": {"m": {"backends": [backend], "adapters": adapters}}}
        )
        return set(wanted(pool.pools["m"], {"b": "/b", "c": "/old"}, "b1", out))

    assert site(4) == {"a", "b", "c", "d"}
    assert site(3) == {"b", "c", "d"}
    assert site(2) == {"b", "d"}
    assert site(2, {"d"}) == {"b", "c"}
    assert site(4, {"a", "d"}) == {"b", "c"}


@pytest.mark.parametrize("most", [None, 4])
def test_a_new_server_holds_of_those_with_a_number_of_copies_what_it_held_or_what_is_pinned_there(
    most,
):
    adapters = [{"name": name, "path": f"/{name}", "replicas": 1} for name in "abc"]
    adapters[2]["pin"] = ["b1"]
    adapters.append({"name": "d", "path": "/d"})
    backend = (
        {"url": "http://h:1"} if most is None else {"url": "http://h:1", "max_cpu_loras": most}
    )
    pool = Config.model_validate({"pools": {"m": {"backends": [backend], "adapters": adapters}}})
    assert set(wanted(pool.pools["m"], {"b": "/b"}, "b1")) == {"b", "c", "d"}


@pytest.mark.parametrize(
    ("version", "mixed"),
    [("0.24.0", True), ("0.32.0", False), ("v0.33.1.dev3+g1", False), ("1.0", False), (None, True)],
)
def test_versions_that_may_mix_adapters_up_are_known(version, mixed):
    backend = Backend("m", "b1", "http://h:1")
    backend.version = version
    assert mixes(backend) is mixed


def test_what_cannot_be_placed_is_found_in_the_settings(tmp_path):
    path = tmp_path / "gateway.yaml"
    text = """\
    pools:
      m:
        backends: [http://h:1, http://h:2]
        adapters:
          - {name: a, replicas: 2}
          - {name: b, path: /b, pin: [b1, b9]}
          - {name: c, path: /c, replicas: 3}
    keys: none
    """
    path.write_text(textwrap.dedent(text))
    codes = {(each.place.line, each.code) for each in check_file(path).findings}
    assert codes >= {(5, "adapter-path"), (6, "unknown-backend"), (7, "too-many-replicas")}


@pytest.mark.parametrize(
    ("version", "unload", "in_use", "waits"),
    [
        ("0.33.0", None, "a", False),
        ("0.33.0", "a", "a", True),
        ("0.33.0", "a", "c", False),
        (None, None, "a", True),  # it loads nothing beside requests for adapters
        (None, None, "", False),
        ("0.33.0", "b", "b", False),  # it is loaded anew, from another path
    ],
)
def test_a_load_is_held_up_until_it_is_asked_for(version, unload, in_use, waits):
    backend, change = (
        Backend("m", "b1", "http://127.0.0.1:8001"),
        Change(Move("m/b1", unload, "b"), 0.0),
    )
    backend.version = version
    assert change.held_up(backend, {*in_use}) == ({"b"} if waits else set())
    change.late_at = 9.0
    assert not change.held_up(backend, {*in_use})
