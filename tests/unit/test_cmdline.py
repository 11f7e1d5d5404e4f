"""The command line and the environment of a launched server."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config.flags import flag_name
from gateway.config.supervision import LaunchConfig
from gateway.launch.cmdline import POLLED, argv, environment, stated
from gateway.launch.launcher import Changes

QUIET = ["--disable-access-log-for-endpoints", ",".join(POLLED)]
ADDRESS = ["--host", "127.0.0.1", "--port", "8001"]
SERVE = ["vllm", "serve", "m"]


def launch(*command, **more):
    return LaunchConfig(command=command or tuple(SERVE), port=8001, **more)


def on_socket(*command, **more):
    return LaunchConfig(command=command or tuple(SERVE), socket="/run/m.sock", **more)


def flags(config, **changes):
    """Return the words after the command, without the address."""
    words = argv(config, Changes(args={k.replace("_", "-"): v for k, v in changes.items()}))
    assert words[-6:] == [*QUIET, *ADDRESS]
    return words[:-6]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, ["--x"]),
        (False, ["--no-x"]),
        (None, []),
        (8192, ["--x", "8192"]),
        (0.92, ["--x", "0.92"]),
        ("fp8", ["--x", "fp8"]),
        (-1, ["--x", "-1"]),
        ("-1", ["--x", "-1"]),
        ("--odd", ["--x=--odd"]),
        ("", ["--x", ""]),
        ("a b; rm -rf /", ["--x", "a b; rm -rf /"]),
        (["a", 2], ["--x", "a", "2"]),
        ([], []),
        ({"level": 3, "é": [1]}, ["--x", '{"level":3,"é":[1]}']),
        ([{"name": "l", "path": "/l"}], ["--x", '{"name":"l","path":"/l"}']),
    ],
)
def test_values_are_written_as_vllm_reads_them(value, words):
    assert flags(launch(args={"x": value})) == [*SERVE, *words]


def test_nothing_configured_leaves_the_command_and_the_address():
    assert argv(launch(), Changes()) == [*SERVE, *QUIET, *ADDRESS]


@pytest.mark.parametrize(
    ("command", "args", "said"),
    [
        (["/opt/vllm/bin/vllm", "serve", "m"], {}, QUIET),
        (["python", "-m", "gateway.sim"], {}, []),  # another program may not know the flag
        (SERVE, {"disable-access-log-for-endpoints": None}, []),
        ([*SERVE, "--disable_access_log_for_endpoints", "/ping"], {}, None),
    ],
)
def test_what_the_gateway_polls_is_not_logged_by_vllm(command, args, said):
    words = argv(launch(*command, args=args), Changes())
    expected = command if said is None else [*command, *said]
    assert words[:-4] == expected


def test_a_socket_takes_the_place_of_host_and_port():
    expected = [*SERVE, *QUIET, "--uds", "/run/m.sock"]
    assert argv(on_socket(), Changes()) == expected
    stated_too = on_socket(*SERVE, "--port", "9", "--host=::", args={"uds": "/x", "host": None})
    assert argv(stated_too, Changes(args={"port": 9})) == expected


def test_a_socket_stated_beside_the_port_is_left_out():
    assert argv(launch(*SERVE, "--uds", "/x"), Changes(args={"uds": "/y"})) == [
        *SERVE,
        *QUIET,
        *ADDRESS,
    ]


@pytest.mark.parametrize(
    ("command", "rest"),
    [
        (["vllm", "serve", "m", "--max-model-len", "4096"], ["vllm", "serve", "m"]),
        (["vllm", "serve", "m", "--max-model-len=4096", "--seed", "1"], [*SERVE, "--seed", "1"]),
        (["vllm", "serve", "--max_model_len", "-1", "m"], ["vllm", "serve", "m"]),
        (["vllm", "serve", "--max-model-len", "1", "m", "--max_model_len=2"], SERVE),
        (["vllm", "serve", "m", "--max-model-len"], SERVE),
    ],
)
def test_args_win_over_the_command_however_it_is_written(command, rest):
    config = launch(*command, args={"max_model_len": 2048})
    assert flags(config) == [*rest, "--max-model-len", "2048"]


def test_changes_win_over_args_and_take_flags_away():
    config = launch(*SERVE, "--kv-cache-dtype", "auto", args={"max-num-seqs": 64, "seed": 1})
    assert flags(config, max_num_seqs=8, kv_cache_dtype=None) == [
        *[*SERVE, "--max-num-seqs", "8"],
        *["--seed", "1"],
    ]
    assert flags(config, seed=None) == [*SERVE, *config.command[3:], "--max-num-seqs", "64"]


@pytest.mark.parametrize(
    "command",
    [
        ["vllm", "serve", "--enforce-eager", "m"],
        ["vllm", "serve", "--no-enforce-eager", "m"],
        ["vllm", "serve", "m", "--enforce_eager"],
    ],
)
def test_a_switch_takes_no_word_with_it(command):
    assert flags(launch(*command), enforce_eager=None) == SERVE
    assert flags(launch(*command), enforce_eager=True) == [*SERVE, "--enforce-eager"]
    assert flags(launch(*command, args={"no-enforce-eager": True})) == [
        *SERVE,
        "--no-enforce-eager",
    ]


def test_a_list_takes_all_its_words_with_it():
    command = [*SERVE, "--lora-modules", "a=/a", "b=/b", "--seed", "1"]
    assert flags(launch(*command), lora_modules=["c=/c"]) == [
        *[*SERVE, "--seed", "1"],
        *["--lora-modules", "c=/c"],
    ]
    assert stated(launch(*command), Changes())["lora-modules"] == ["a=/a", "b=/b"]


@pytest.mark.parametrize(
    ("command", "args", "size"),
    [
        ([], {}, ["--tensor-parallel-size", "2"]),
        (["--tensor-parallel-size", "1"], {}, None),
        (["-tp", "2"], {}, None),
        (["-tp=2"], {}, None),
        (["--pipeline_parallel_size=2"], {}, None),
        (["-dp", "2"], {}, None),
        ([], {"data-parallel-size": 2}, None),
        ([], {"tensor_parallel_size": 2}, ["--tensor-parallel-size", "2"]),
        (["-tp", "4"], {"tensor-parallel-size": 2}, ["--tensor-parallel-size", "2"]),
    ],
)
def test_tensor_parallel_size_follows_from_gpus_unless_a_size_is_stated(command, args, size):
    words = flags(launch(*SERVE, *command, gpus=[0, 1], args=args))
    if size is None:
        written = [f"--{k}" for k in args]
        assert [w for w in words if w.startswith("--tensor")] == [
            w for w in command if w.startswith("--tensor")
        ]
        assert all(flag in words for flag in written)
    else:
        assert words == [*SERVE, *size]


@pytest.mark.parametrize("gpus", [[], [3]])
def test_one_gpu_needs_no_size(gpus):
    assert flags(launch(gpus=gpus)) == SERVE


def test_it_is_asked_without_tls_so_it_is_started_without():
    command = [
        *SERVE,
        "--ssl-certfile",
        "c.pem",
        "--ssl_keyfile=k.pem",
        "--enable-ssl-refresh",
        "--seed",
        "1",
    ]
    more = {"ssl_certfile": "c.pem", "ssl-cert-reqs": 2}
    assert flags(launch(*command, args=more)) == [*SERVE, "--seed", "1"]


def test_the_address_is_always_ours():
    config = launch(
        *[*SERVE, "--host", "0.0.0.0", "--port=1"], args={"port": 2, "host": "10.0.0.1"}
    )
    assert argv(config, Changes(args={"port": 3})) == [*SERVE, *QUIET, *ADDRESS]
    without = launch("vllm-gateway", "sim", args={"host": None})
    assert argv(without, Changes()) == ["vllm-gateway", "sim", "--port", "8001"]


def test_what_is_in_force_is_told_by_name():
    config = launch(
        *["vllm", "serve", "m", "--max_model_len=4k", "-tp", "2", "--enforce-eager"],
        *["--no-enable-prefix-caching", "-cc", '{"level":0}', "--seed", "-1"],
        args={"max-num-seqs": 64, "kv_cache_dtype": "fp8", "load-format": None},
    )
    assert stated(config, Changes(args={"max-num-seqs": 8, "seed": None})) == {
        "max-model-len": "4k",
        "tensor-parallel-size": "2",
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "compilation-config": '{"level":0}',
        "max-num-seqs": 8,
        "kv-cache-dtype": "fp8",
    }


@pytest.mark.parametrize(
    ("written", "name"),
    [("--max_model_len", "max-model-len"), ("hf-overrides.a_b", "hf-overrides.a_b"), ("x", "x")],
)
def test_names_are_vllms(written, name):
    assert flag_name(written) == name


words = st.one_of(
    st.sampled_from(["--seed", "--seed=1", "-tp", "--no-x", "--", "-", "--enable-lora", "1", ""]),
    st.text(max_size=5),
)


@given(st.lists(words, min_size=1), st.dictionaries(st.text(max_size=4), st.integers() | st.none()))
def test_any_words_give_one_address_and_no_doubled_change(command, args):
    config = launch(*command, args=args)
    line = argv(config, Changes(args={"seed": 7}))
    assert line[0] == command[0]
    assert line[-1] == "8001"
    assert line.count("--seed") <= 1 + command[:1].count("--seed")
    assert not [word for word in line[1:] if word.startswith("--seed=")]
    assert json.dumps(dict(stated(config, Changes())))


# --- environment ----------------------------------------------------------------------------------


def test_the_gateways_own_variables_are_not_inherited():
    base = {
        "PATH": "/bin",
        "HF_TOKEN": "hf",
        "GATEWAY_ADMIN_TOKEN": "secret",
        "GATEWAY_START": "of the gateway that launched this gateway",
        "NOTIFY_SOCKET": "/run/systemd/notify",
        "LISTEN_FDS": "1",
        "WATCHDOG_USEC": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    }
    assert environment(launch(), base, Changes(), {"GATEWAY_BACKEND": "a/b"}) == {
        "PATH": "/bin",
        "HF_TOKEN": "hf",
        "PYTHONUNBUFFERED": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "GATEWAY_BACKEND": "a/b",
    }


def test_gpus_are_counted_as_nvidia_smi_does():
    found = environment(launch(gpus=[2, 0]), {"CUDA_VISIBLE_DEVICES": "7"}, Changes(), {})
    assert found["CUDA_VISIBLE_DEVICES"] == "2,0"
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment(launch(), {"CUDA_VISIBLE_DEVICES": "7"}, Changes(), {}) == {
        "CUDA_VISIBLE_DEVICES": "7",
        "PYTHONUNBUFFERED": "1",
    }


def test_changes_win_over_the_configured_and_the_marker_over_all():
    config = launch(gpus=[0], env={"CUDA_VISIBLE_DEVICES": "MIG-1", "A": "1", "M": "forged"})
    found = environment(config, {}, Changes(env={"A": "2", "M": "forged"}), {"M": "true"})
    assert (found["CUDA_VISIBLE_DEVICES"], found["A"], found["M"]) == ("MIG-1", "2", "true")
