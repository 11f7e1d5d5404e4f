"""Paths of UNIX sockets in the settings."""

import pathlib

import pytest

from gateway.config.load import check_text
from gateway.config.sockets import MOST_BYTES

FOLDER = pathlib.Path("/etc/gateway")


def checked(socket):
    text = f"pools:\n  m:\n    backends:\n    - launch: {{command: [v], socket: {socket}}}\n"
    return check_text(text, file="gw.yaml", folder=FOLDER, env={})


def refusal(socket):
    """Return the finding at the socket; that the backend has no address then is told, too."""
    path = ("pools", "m", "backends", 0, "launch", "socket")
    (finding,) = [each for each in checked(socket).findings if each.path == path]
    return finding


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("run/m.sock", "/etc/gateway/run/m.sock"),
        ("/run/vllm/m.sock", "/run/vllm/m.sock"),
        ("//run//vllm/./m.sock", "/run/vllm/m.sock"),
    ],
)
def test_a_launched_backend_is_reached_where_it_listens(written, path):
    loaded = checked(written).loaded
    assert loaded is not None
    (backend,) = loaded.config.pools["m"].backends
    assert backend.launch is not None
    assert str(backend.launch.socket) == path
    assert backend.url == f"unix:{path}"


def test_the_longest_path_is_what_the_system_takes():
    longest = "/" + "é" * ((MOST_BYTES - 1) // 2)
    assert len(longest.encode()) == MOST_BYTES
    assert checked(longest).findings == ()
    finding = refusal(longest + "x")
    assert (finding.code, finding.place.line) == ("bad-socket", 4)
    assert "has 108 bytes; the system allows at most 107" in finding.message


def test_the_folder_of_the_file_counts_too():
    finding = refusal("x" * 100)
    assert "has 113 bytes" in finding.message


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("''", "is empty"),
        ("unix:/run/m.sock", "without unix:"),
        (r'"/run/\u0000m"', "control characters"),
        (r'"/run/\nm"', "control characters"),
        ("[a]", "must be a path"),
    ],
)
def test_what_is_no_path_is_refused(written, says):
    finding = refusal(written)
    assert says in finding.message


def test_two_backends_of_a_pool_on_one_socket_are_one():
    launch = "{launch: {command: [v], socket: m.sock}}"
    text = f"pools: {{m: {{backends: [{launch}, 'unix:{FOLDER}/m.sock']}}}}"
    (finding,) = check_text(text, folder=FOLDER).findings
    assert finding.code == "duplicate-backend"
    assert f"unix:{FOLDER}/m.sock is already listed as b1" in finding.message
