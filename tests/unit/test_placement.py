"""Where launched backends go: GPUs, memory, ports, targets, remedies."""

import pytest

from gateway.config.findings import Severity
from gateway.config.models import Config
from gateway.config.placement import check_placement

VLLM = ["vllm", "serve", "m"]


def launched(port, *words, gpus=(), name=None, **more):
    launch = {"command": [*VLLM, *words], "port": port, "gpus": list(gpus), **more}
    return {"launch": launch} | ({"name": name} if name else {})


def found(*pools, **more):
    """Return (code, severity, path below the pools, message) of each remark."""
    named = {f"p{n}": p if isinstance(p, dict) else {"backends": p} for n, p in enumerate(pools, 1)}
    config = Config.model_validate({"pools": named, **more})
    return list(check_placement(config))


def codes(*pools, severity=Severity.ERROR, **more):
    return [each.code for each in found(*pools, **more) if each.severity is severity]


def warnings(*pools, **more):
    return codes(*pools, severity=Severity.WARNING, **more)


def test_what_is_placed_well_is_silent():
    backends = [
        launched(8001, gpus=[0, 1]),
        launched(8002, "-tp", "2", "-pp", "2", gpus=[2, 3, 4, 5]),
        launched(8003, "--gpu-memory-utilization", "0.45", gpus=[6]),
        launched(8004, gpus=[6], args={"gpu_memory_utilization": 0.5}),
        "http://10.0.0.1:8001",
    ]
    assert found({"backends": backends, "remedies": ["lower_max_model_len", "enforce_eager"]}) == []


# --- GPUs -----------------------------------------------------------------------------------------


def test_shares_of_one_gpu_that_exceed_it_are_refused_with_the_numbers():
    (remark,) = found(
        [launched(8001, gpus=[0])], [launched(8002, "--gpu-memory-utilization=0.3", gpus=[0])]
    )
    assert (remark.code, remark.severity) == ("gpu-memory", Severity.ERROR)
    assert remark.path == ("pools", "p2", "backends", 0, "launch", "gpus")
    assert "GPU 0: p1/b1 0.92, p2/b1 0.3 add up to 1.22 of its memory" in remark.message


@pytest.mark.parametrize(
    ("shares", "refused"),
    [([0.5, 0.47], False), ([0.5, 0.48], True), ([0.3, 0.3, 0.3], False), ([0.4, 0.4, 0.4], True)],
)
def test_the_limit_is_97_percent_together(shares, refused):
    backends = [
        launched(8000 + n, gpus=[0], args={"gpu-memory-utilization": share})
        for n, share in enumerate(shares)
    ]
    assert codes(backends) == (["gpu-memory"] if refused else [])


def test_those_that_share_several_gpus_are_told_of_once():
    assert codes([launched(8001, gpus=[0, 1]), launched(8002, gpus=[1, 0])]) == ["gpu-memory"]


def test_a_fixed_cache_is_not_a_share_but_leaves_room_for_it():
    fixed = launched(8002, "--kv-cache-memory-bytes", "4G", gpus=[0])
    assert found([fixed, launched(8001, "--gpu-memory-utilization", "0.5", gpus=[0])]) == []
    assert found([fixed, launched(8003, "--kv-cache-memory-bytes", "4G", gpus=[0])]) == []
    (remark,) = found([fixed, launched(8001, gpus=[0])])
    assert (remark.code, remark.severity) == ("gpu-memory", Severity.WARNING)
    assert "leaves too little for p1/b1" in remark.message
    two = [fixed, launched(8001, gpus=[0]), launched(8003, gpus=[0])]
    assert codes(two) == ["gpu-memory"]


def test_engines_that_can_sleep_may_share_a_gpu_in_turn():
    both = [launched(port, "--enable-sleep-mode", gpus=[0]) for port in (8001, 8002)]
    assert warnings(both) == ["gpu-memory"]
    assert codes([both[0], launched(8002, gpus=[0])]) == ["gpu-memory"]


@pytest.mark.parametrize("share", ["a lot", True, [0.5]])
def test_a_share_that_is_no_number_is_for_vllm_to_refuse(share):
    args = {"gpu-memory-utilization": share}
    assert found([launched(8001, gpus=[0]), launched(8002, gpus=[0], args=args)]) == []


def test_a_gpu_listed_twice_is_refused():
    (remark,) = found([launched(8001, gpus=[0, 1, 0])])
    assert (remark.code, remark.severity) == ("duplicate-gpu", Severity.ERROR)


@pytest.mark.parametrize(
    ("words", "args", "gpus", "fits"),
    [
        (["-tp", "2"], {}, [0, 1], True),
        (["--tensor_parallel_size=2"], {}, [0], False),
        (["-tp", "2", "-pp", "2"], {}, [0, 1], False),
        (["-tp", "2"], {"data-parallel-size": 2}, [0, 1, 2, 3], True),
        (["-tp", "2"], {"tensor-parallel-size": 1}, [0, 1], False),
        (["-tp", "2"], {"tensor-parallel-size": None}, [0], True),
        ([], {}, [0, 1, 2], True),
        (["-tp", "4"], {}, [], True),
        (["-dp", "8", "-dpl", "2"], {}, [0, 1], True),
        (["-tp", "2", "--nnodes", "2"], {}, [0], True),
        (["-dp", "4", "--data-parallel-rank", "1"], {}, [0], True),
        (["-tp", "8"], {"distributed-executor-backend": "ray"}, [0], True),
        (["-tp", "many"], {}, [0], True),
    ],
)
def test_parallel_sizes_take_as_many_gpus_as_there_are(words, args, gpus, fits):
    backend = launched(8001, *words, gpus=gpus, args=args)
    assert codes([backend]) == ([] if fits else ["parallel-size"])


def test_a_wrong_size_is_told_with_its_factors():
    (remark,) = found([launched(8001, "-tp", "2", "-pp", "2", gpus=[0, 1])])
    assert (
        "lists 2, but tensor-parallel-size 2 x pipeline-parallel-size 2 needs 4" in remark.message
    )


def test_two_ways_to_name_gpus_are_doubtful():
    env = {"CUDA_VISIBLE_DEVICES": "1"}
    assert warnings([launched(8001, gpus=[0], env=env)]) == ["gpus-overridden"]
    assert found([launched(8001, env=env)]) == []


# --- ports and targets ----------------------------------------------------------------------------


def test_ports_are_unique_between_pools():
    (remark,) = found([launched(8001)], [launched(8001)])
    assert (remark.code, remark.path[-1]) == ("duplicate-port", "port")
    assert "port 8001 of p2/b1 is already used by p1/b1" in remark.message


@pytest.mark.parametrize(
    ("listen", "clash"),
    [
        ("127.0.0.1:8001", True),
        ("0.0.0.0:8001", True),
        ("[::]:8001", True),
        ("10.0.0.1:8001", False),
        ("127.0.0.1:8002", False),
        ("unix:/run/gw.sock", False),
    ],
)
def test_the_gateways_own_ports_are_taken(listen, clash):
    assert codes([launched(8001)], listen=listen) == (["duplicate-port"] if clash else [])
    assert codes([launched(9090)]) == ["duplicate-port"]


def test_another_address_in_the_command_line_is_told():
    assert warnings([launched(8001, "--host", "0.0.0.0", "--port", "9")]) == ["launch-address"] * 2
    assert found([launched(8001, "--host", "127.0.0.1", "--port", "8001")]) == []
    assert found([launched(8001, args={"host": None})]) == []
    assert codes([launched(8001, "--uds", "/run/vllm.sock")]) == ["launch-address"]
    here = ["--uds", "/run/m.sock"]
    assert found([launched(None, *here, socket="/run/m.sock")]) == []
    assert warnings([launched(None, *here, socket="/run/n.sock")]) == ["launch-address"]
    elsewhere = launched(None, "--host", "127.0.0.1", "--port", "8001", socket="/run/m.sock")
    assert warnings([elsewhere]) == ["launch-address"] * 2


def test_sockets_are_unique_between_pools_and_not_the_gateways_own():
    one = launched(None, socket="/run/m.sock")
    (remark,) = found([one], [launched(None, socket="/run//m.sock")])
    assert (remark.code, remark.path[-1]) == ("duplicate-socket", "socket")
    assert "socket /run/m.sock of p2/b1 is already used by p1/b1" in remark.message
    assert found([one], [launched(None, socket="/run/n.sock")], [launched(8001)]) == []
    assert codes([one], listen="unix:/run/m.sock") == ["duplicate-socket"]
    assert codes([one], listen="unix:/run/gw.sock") == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"systemd": "vllm@1"}, {"systemd": "vllm@1.service"}, True),
        ({"systemd": "vllm@1"}, {"systemd": "vllm@2"}, False),
        ({"docker": "vllm"}, {"docker": "vllm"}, True),
        ({"docker": "vllm"}, {"systemd": "vllm"}, False),
        ({"kubernetes": "ml/vllm-0"}, {"kubernetes": "ml/pod/vllm-0"}, True),
        ({"kubernetes": "ml/deployment/v"}, {"kubernetes": "ml/deployment/v"}, True),
        ({"kubernetes": "ml/deployment/v"}, {"kubernetes": "ml/v"}, False),
        ({"command": ["r"]}, {"command": ["r"]}, False),
    ],
)
def test_no_two_backends_are_restarted_as_one(one, other, same):
    pools = [[{"url": f"http://h:{n}", "restart": each}] for n, each in enumerate((one, other), 1)]
    assert codes(*pools) == (["duplicate-target"] if same else [])


# --- remedies -------------------------------------------------------------------------------------


def test_remedies_without_a_launched_backend_are_idle():
    pool = {"backends": ["http://h:1"], "remedies": ["enforce_eager"]}
    (remark,) = found(pool)
    assert (remark.code, remark.severity) == ("idle-remedy", Severity.WARNING)
    assert remark.path == ("pools", "p1", "remedies")


@pytest.mark.parametrize(
    ("remedy", "idle", "useful"),
    [
        ("enforce_eager", ["--enforce-eager"], []),
        ("fp8_kv_cache", ["--kv-cache-dtype", "fp8_e5m2"], ["--kv-cache-dtype", "auto"]),
        ("adjust_gpu_memory_utilization", ["--kv-cache-memory-bytes", "1G"], []),
        ("lower_max_model_len", ["--max-model-len", "4096"], ["--max-model-len", "32k"]),
        ("lower_max_num_seqs", ["--max-num-seqs", "8"], ["--max-num-seqs", "9"]),
    ],
)
def test_a_remedy_that_can_do_nothing_is_told(remedy, idle, useful):
    def pool(*words):
        return {"backends": words, "remedies": [remedy]}

    useless, other = launched(8001, *idle), launched(8002, *useful)
    assert warnings(pool(useless)) == ["idle-remedy"]
    assert warnings(pool(other)) == []
    assert warnings(pool(useless, other)) == []


def test_gpus_that_talk_to_no_other_need_no_p2p():
    assert warnings({"backends": [launched(8001, gpus=[0])], "remedies": ["nccl_p2p_off"]}) == [
        "idle-remedy"
    ]
    two = {"backends": [launched(8001, gpus=[0, 1])], "remedies": ["nccl_p2p_off"]}
    assert warnings(two) == []


def test_a_remedy_listed_twice_is_told():
    pool = {"backends": [launched(8001)], "remedies": ["spawn", "spawn"]}
    assert warnings(pool) == ["idle-remedy"]
