"""Start one process: the checks before, the start itself, and the exit code.

Never by a shell: the words of the configuration are the words of the process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gateway.config.supervision import LaunchConfig
from gateway.launch import cmdline, proc
from gateway.launch.launcher import Changes, LaunchError, Obstacle, obstacle_of
from gateway.launch.record import told

_PROBE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Start:
    """A start whose program was found."""

    program: str
    words: list[str]
    variables: dict[str, str]


def prepare(launch: LaunchConfig, changes: Changes, marker: Mapping[str, str]) -> Start:
    """Return the start that the settings ask for. Nothing has happened yet.

    Raises:
        LaunchError: there is no such program, or the words or variables cannot be passed to any program.
    """
    words = cmdline.argv(launch, changes)
    variables = cmdline.environment(launch, os.environ, changes, marker)
    # The message does not repeat the text: it may be a secret.
    if any("\0" in text for text in (*words, *variables, *variables.values())):
        raise LaunchError("a word or variable of `launch` holds a null byte", Obstacle.CANNOT_HELP)
    if any(not name or "=" in name for name in variables):
        raise LaunchError("a name in `launch.env` is empty or holds a `=`", Obstacle.CANNOT_HELP)
    program = shutil.which(words[0], path=variables.get("PATH", os.defpath))
    if program is None:
        raise LaunchError(_no_program(words[0]), Obstacle.CANNOT_HELP)
    return Start(program, words, variables)


def check_address(launch: LaunchConfig) -> None:
    """Make sure that nobody listens at the server's address.

    Raises:
        LaunchError: somebody does, or another file is in the place of the socket.
        OSError: the address may not be used at all.
    """
    if launch.port is not None:
        check_port(launch.port)
    if launch.socket is not None:
        clear_socket(launch.socket)


def check_port(port: int) -> None:
    """Make sure that nobody listens on the server's port.

    With --api-server-count above 1 vLLM itself does not notice: two servers would share the port.

    Raises:
        LaunchError: somebody does; the message says who, if this user may see it.
        OSError: the port may not be used at all.
    """
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does
        try:
            probe.bind((cmdline.HOST, port))
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    found = proc.holders(proc.listening(port))
    by = f" by {', '.join(map(str, found))}" if found else ""
    raise LaunchError(
        f"port {port} is already in use{by}, not by a server of this gateway. Stop it"
        f" (`ss -ltnp 'sport = {port}'` shows it), or choose another `launch.port`",
        Obstacle.PORT,
    )


def clear_socket(path: Path) -> None:
    """Make the folder of a socket, and remove the socket that an ended server left there.

    A starting server holds its socket long before it listens: vLLM binds it first, and then loads
    its model. The target of a link is never removed.

    Raises:
        LaunchError: somebody holds it, or it is another kind of file.
        OSError: the system refused.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise LaunchError(
            f"{path} is not a socket. Remove it, or choose another `launch.socket`",
            Obstacle.CANNOT_HELP,
        )
    if (inodes := proc.bound(path)) or _answers(path):
        found = proc.holders(inodes)
        by = f" by {', '.join(map(str, found))}" if found else ""
        raise LaunchError(
            f"the socket {path} is already in use{by}, not by a server of this gateway. Stop it"
            f" (`ss -xlp src {path}` shows it), or choose another `launch.socket`",
            Obstacle.PORT,
        )
    path.unlink(missing_ok=True)


def spawn(start: Start, mark: Mapping[str, str], output: int) -> int:
    """Start a process in a session and group of its own, writing to `output`; return its pid.

    It inherits no other file of ours: not the listeners, whose ports it would hold after our end.
    This takes a millisecond. The process is our child until `exit_code` reaps it.

    Raises:
        LaunchError: the system refused.
    """
    inherited = [
        (os.POSIX_SPAWN_CLOSE, number)
        for number in map(int, os.listdir("/proc/self/fd"))
        if number > 2 and _is_inherited(number)
    ]
    try:
        return os.posix_spawn(
            start.program,
            start.words,
            {**start.variables, **mark},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output, 1),
                (os.POSIX_SPAWN_DUP2, output, 2),
                *inherited,
            ],
            setsid=True,
            setsigmask=[],
            # Signals that we ignore would stay ignored: SIGPIPE and SIGXFSZ by Python, SIGHUP by nohup.
            setsigdef=[
                signal.SIGINT,
                signal.SIGTERM,
                signal.SIGHUP,
                signal.SIGPIPE,
                signal.SIGXFSZ,
            ],
        )
    except OSError as error:
        raise LaunchError(
            f"cannot start {start.program}: {told(error)}", obstacle_of(error)
        ) from error


def exit_code(pid: int, *, reap: bool) -> int | None:
    """Return how a child of ours ended: its code, or the signal's number below zero.

    None while it runs, and for a process that is not our child. Until it is reaped, its pid is not reused.
    """
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | (0 if reap else os.WNOWAIT))
    except ChildProcessError:
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _answers(path: Path) -> bool:
    """Whether somebody listens on a socket, in another network namespace, too."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except (BlockingIOError, TimeoutError):  # its backlog is full
            return True
        return True


def _is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:
        return False


def run_together(program: str) -> str:
    """Return the first word, if a whole command line stands in the place of a program's name; else an empty text.

    The other words must not be shown: they may hold a key.
    """
    first, *more = program.split() or [""]
    return first if more and ("/" not in first or Path(first).is_file()) else ""


def _no_program(name: str) -> str:
    path = Path(name)
    if first := run_together(name):
        return (
            f"the first word of `launch.command` is a whole command line, `{first} ...`; write each of its"
            f" words apart: [{first}, ...]"
        )
    if path.exists():
        why = "is a folder" if path.is_dir() else "is not executable by this user"
        return f"the program {name} {why}"
    if "/" in name:
        return f"the program {name} does not exist; check the first word of `launch.command`"
    return (
        f"the program `{name}` is not on the PATH; write its full path as the first word of"
        " `launch.command`, such as /opt/vllm/bin/vllm"
    )
