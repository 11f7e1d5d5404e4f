"""What replicas call a backend: one id means two servers where each machine has its own."""

import pytest

from gateway.heal.names import Names
from gateway.pools.backend import Backend


def backend(url):
    return Backend("m", "b1", url, None)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8000", "http://[::1]:8000", "http://localhost:1", "unix:/run/vllm"]
)
def test_a_backend_of_this_machine_has_its_name_in_it(url):
    names, others = Names("one"), Names("other")
    assert names.of(backend(url)) == "m/b1@one"
    assert names.lease("m", [backend("http://10.0.0.1:8000"), backend(url)]) == "restarts/m@one"
    assert others.of(backend(url)) != names.of(backend(url))


@pytest.mark.parametrize("url", ["http://10.0.0.1:8000", "http://vllm-0.vllm:8000", "https://h"])
def test_a_backend_that_all_reach_has_one_name(url):
    assert Names("one").of(backend(url)) == Names("other").of(backend(url)) == "m/b1"
    assert Names("one").lease("m", [backend(url)]) == "restarts/m"


def test_a_pool_with_servers_of_this_machine_is_this_machines():
    local, remote = backend("http://127.0.0.1:8000"), backend("http://10.0.0.1:8000")
    assert Names("one").scope([remote, local]) == "@one"
    assert Names("one").scope([remote]) == ""


def test_this_machine_is_known_by_its_host_name():
    assert Names().of(backend("http://127.0.0.1:1")) == Names().of(backend("http://127.0.0.1:1"))
    assert "@" in Names().of(backend("http://127.0.0.1:1"))
