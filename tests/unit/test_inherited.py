"""Listeners that somebody else opened: whose they are, and whether they are where the settings say."""

import os
import socket
import subprocess
import sys

import pytest

from gateway.config.units import Listen, parse_listen
from gateway.core.errors import ConfigError
from gateway.ingress.inherited import Given, from_systemd, is_at, listeners
from gateway.ingress.listener import bind


class Settings:
    """The part of the configuration that listeners are made of."""

    def __init__(self, listen, admin="127.0.0.1:0"):
        self.listen = parse_listen(listen)
        self.admin = type("Admin", (), {"listen": parse_listen(admin)})


@pytest.fixture
def opened():
    with bind(Listen("127.0.0.1", 0)) as listener:
        yield listener


def port(listener):
    return listener.getsockname()[1]


def test_a_listener_is_where_the_settings_say(opened):
    assert is_at(opened, Listen("127.0.0.1", port(opened)))
    assert is_at(opened, Listen("localhost", port(opened)))
    assert is_at(opened, Listen("127.0.0.1", 0)), "port 0 is any port"
    assert not is_at(opened, Listen("127.0.0.1", port(opened) + 1))
    assert not is_at(opened, Listen("127.0.0.2", port(opened)))
    assert not is_at(opened, Listen("0.0.0.0", port(opened)))
    assert not is_at(opened, parse_listen("unix:/run/gw.sock"))


def test_all_addresses_are_all_addresses_of_either_family():
    with socket.create_server(("0.0.0.0", 0)) as listener:
        assert is_at(listener, Listen("0.0.0.0", port(listener)))
        assert is_at(listener, Listen("::", port(listener)))
        assert not is_at(listener, Listen("127.0.0.1", port(listener)))


def test_a_unix_listener_is_at_its_path(tmp_path):
    with bind(Listen(unix=tmp_path / "gw.sock")) as listener:
        assert is_at(listener, Listen(unix=tmp_path / "gw.sock"))
        assert not is_at(listener, Listen(unix=tmp_path / "other.sock"))
        assert not is_at(listener, Listen("127.0.0.1", 0))


def test_what_is_given_is_used_and_the_rest_is_bound(opened):
    public, admin, kept = listeners(Settings("127.0.0.1:0"), Given({"public": opened}, kept=True))
    with admin:
        assert public is opened
        assert kept
        assert not public.getblocking()
        assert port(admin) != port(public)


def test_systemd_and_the_settings_have_to_agree(opened):
    told = rf"listens on 127.0.0.1:{port(opened)}, but `listen` says 127.0.0.1:1\."
    with pytest.raises(ConfigError, match=told):
        listeners(Settings("127.0.0.1:1"), Given({"public": opened}, kept=True))


def test_a_new_process_binds_where_the_settings_say_by_now(opened):
    public, admin, kept = listeners(Settings("127.0.0.2:0"), Given({"public": opened}))
    with public, admin:
        assert public.getsockname()[0] == "127.0.0.2"
        assert not kept
        assert opened.fileno() == -1


def test_what_systemd_told_another_process_is_nothing():
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "public", "PATH": "/bin"}
    assert from_systemd(environ).sockets == {}
    assert environ == {"PATH": "/bin"}
    assert from_systemd({}) == Given()


def given_by_systemd(names, *given):
    """Say what a process makes of sockets that it is started with, from file descriptor 3 on."""
    ask = (
        "import os; from gateway.ingress.inherited import from_systemd; from gateway.core.errors import ConfigError\n"
        "os.environ['LISTEN_PID'] = str(os.getpid())\n"
        "try:\n"
        "    found = from_systemd(os.environ)\n"
        "    print({n: s.getsockname()[1] for n, s in found.sockets.items()}, found.kept,"
        " [os.get_inheritable(s.fileno()) for s in found.sockets.values()])\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    count = len(given)
    moved = " ".join(f"{number}<&{each.fileno()}" for number, each in enumerate(given, 3))
    ran = subprocess.run(
        ["bash", "-c", f'exec "$0" -c "$1" {moved}', sys.executable, ask],
        env={**os.environ, "LISTEN_FDS": str(count), "LISTEN_FDNAMES": names},
        pass_fds=[each.fileno() for each in given],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return ran.stdout.strip()


@pytest.mark.parametrize("name", ["public", "vllm-gateway.socket", ""])
def test_a_single_socket_of_systemd_is_the_public_one(opened, name):
    assert given_by_systemd(name, opened) == f"{{'public': {port(opened)}}} True [False]"


def test_two_sockets_of_systemd_go_by_their_names(opened):
    with bind(Listen("127.0.0.1", 0)) as other:
        told = given_by_systemd("admin:public", opened, other)
        assert told == f"{{'admin': {port(opened)}, 'public': {port(other)}}} True [False, False]"
        assert "The names are public and admin" in given_by_systemd("admin:web", opened, other)
        assert "two sockets with the name admin" in given_by_systemd("admin:admin", opened, other)


def test_a_socket_of_systemd_that_does_not_listen_is_told():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(("127.0.0.1", 0))
        assert "accepts no connections" in given_by_systemd("public", datagrams)
