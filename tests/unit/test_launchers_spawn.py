"""Whether a server can listen on its UNIX socket, and what is removed for it."""

import contextlib
import errno
import os
import socket
import stat

import pytest

from gateway.launch.launcher import LaunchError
from gateway.launch.spawn import clear_socket


@contextlib.contextmanager
def bound(path, *, listens):
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as held:
        held.bind(str(path))
        if listens:
            held.listen()
        yield held


def left_behind(path):
    with bound(path, listens=True):
        pass
    assert path.is_socket()
    return path


def test_a_folder_is_made_for_this_user_alone(tmp_path):
    where = tmp_path / "run" / "m.sock"
    clear_socket(where)
    assert stat.S_IMODE(where.parent.stat().st_mode) == 0o700
    clear_socket(where)
    assert list(where.parent.iterdir()) == []


def test_what_an_ended_server_left_is_removed(tmp_path):
    where = left_behind(tmp_path / "a b.sock")
    clear_socket(where)
    with bound(where, listens=True):
        assert where.is_socket()


@pytest.mark.parametrize("listens", [True, False])
def test_a_socket_that_somebody_holds_stays_whether_he_listens_yet_or_not(tmp_path, listens):
    where = tmp_path / "a b.sock"
    with bound(where, listens=listens):
        with pytest.raises(LaunchError) as raised:
            clear_socket(where)
        assert f"the socket {where} is already in use by {os.getpid()} (" in str(raised.value)
        assert where.is_socket()


def test_a_listener_that_took_the_path_of_another_name_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with bound("m.sock", listens=True):
        with pytest.raises(LaunchError, match=r"m\.sock is already in use"):
            clear_socket(tmp_path / "m.sock")
        assert (tmp_path / "m.sock").is_socket()


def test_a_listener_with_a_full_backlog_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with bound("m.sock", listens=False) as held, contextlib.ExitStack() as stack:
        held.listen(0)
        refused = 0
        while refused != errno.EAGAIN:
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            refused = client.connect_ex("m.sock")
        with pytest.raises(LaunchError, match="is already in use"):
            clear_socket(tmp_path / "m.sock")


def test_a_connection_that_outlived_its_listener_is_in_nobodys_way(tmp_path):
    where = tmp_path / "m.sock"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as client:
        with bound(where, listens=True) as held:
            client.connect(str(where))
            served, _ = held.accept()
        with served:
            clear_socket(where)
    assert not where.exists()


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling"])
def test_what_is_no_socket_is_never_removed(tmp_path, kind):
    where, target = tmp_path / "m.sock", tmp_path / "target"
    match kind:
        case "file":
            where.write_text("keep me")
        case "folder":
            where.mkdir()
        case "link":
            where.symlink_to(left_behind(target))
        case "dangling":
            where.symlink_to(target)
    with pytest.raises(LaunchError, match=r"m\.sock is not a socket"):
        clear_socket(where)
    assert os.path.lexists(where)
    assert target.exists() is (kind == "link")
