"""Watch the file operations of a forked child at its system calls, whoever makes them: Python, Arrow, faiss, ONNX.

Linux asks us before each of them (seccomp's user notification, ``man 2 seccomp_unotify``), and we let it pass, make it fail, or
kill the child before it is done. So no writer is overlooked, and nothing has to be compiled.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import os
import platform
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

AT_FDCWD = -100
KILL = -1
"""Answer to a call: the child dies before it is done."""
FAILED = 70
"""Exit status of a child that raised."""
Answer = int | None
"""None lets a call pass, an errno makes it fail, :data:`KILL` kills."""

# name -> (number on x86-64, number on ARM64 or None, what its arguments are)
# f: descriptor of a file, d: descriptor of a folder that the path after it starts from, p: path
CALLS = {
    "open": (2, None, "p"),
    "openat": (257, 56, "dp"),
    "creat": (85, None, "p"),
    "read": (0, 63, "f"),
    "pread64": (17, 67, "f"),
    "readv": (19, 65, "f"),
    "getdents64": (217, 61, "f"),
    "write": (1, 64, "f"),
    "pwrite64": (18, 68, "f"),
    "writev": (20, 66, "f"),
    "sendfile": (40, 71, "f"),
    "copy_file_range": (326, 285, "--f"),
    "fsync": (74, 82, "f"),
    "fdatasync": (75, 83, "f"),
    "truncate": (76, 45, "p"),
    "ftruncate": (77, 46, "f"),
    "fallocate": (285, 47, "f"),
    "rename": (82, None, "pp"),
    "renameat": (264, 38, "dpdp"),
    "renameat2": (316, 276, "dpdp"),
    "unlink": (87, None, "p"),
    "unlinkat": (263, 35, "dp"),
    "rmdir": (84, None, "p"),
    "mkdir": (83, None, "p"),
    "mkdirat": (258, 34, "dp"),
    "link": (86, None, "pp"),
    "linkat": (265, 37, "dpdp"),
    "symlink": (88, None, "-p"),
    "symlinkat": (266, 36, "-dp"),
    "stat": (4, None, "p"),
    "lstat": (6, None, "p"),
    "fstat": (5, 80, "f"),
    "newfstatat": (262, 79, "dp"),
    "statx": (332, 291, "dp"),
    "mmap": (9, 222, "----f"),
    "close": (3, 57, "f"),
}
READS = ("read", "pread64", "readv", "getdents64", "stat", "lstat", "fstat", "newfstatat", "statx", "mmap", "close")
_ARCHITECTURE = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
_NUMBERS = {numbers[_ARCHITECTURE]: name for name, numbers in CALLS.items()} if _ARCHITECTURE is not None else {}
_NUMBERS.pop(None, None)
_SECCOMP = {"x86_64": 317, "aarch64": 277}.get(platform.machine(), 0)
_NOTICE, _ANSWER = struct.Struct("QIIiIQ6Q"), struct.Struct("QqiI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Call:
    """A system call that is about to be made.

    Args:
        name: such as ``write``.
        paths: of its files below the watched folder, relative to it; None for one that lies elsewhere.
        arguments: the six numbers.
        pid: who makes it.
    """

    name: str
    paths: tuple[str | None, ...]
    arguments: tuple[int, ...]
    pid: int

    @property
    def creates(self) -> bool:
        """Whether it opens a file for writing, or makes it."""
        flags = {"open": 1, "openat": 2}.get(self.name)
        return self.name == "creat" or (
            flags is not None and bool(self.arguments[flags] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
        )

    @property
    def changes(self) -> bool:
        """Whether it changes a file or folder, or makes a change last."""
        return self.creates or (self.name not in READS and self.name not in ("open", "openat"))

    def memory(self, address: int, size: int) -> bytes:
        """Return what is in the memory of whoever calls."""
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as file:  # noqa: PTH123
            file.seek(address)
            return file.read(size)


@dataclass(frozen=True)
class Outcome:
    """How a child ended.

    Args:
        code: its exit status; minus the signal's number if one killed it.
        output: what it wrote to stdout.
        errors: what it wrote to stderr.
        reported: whether the function returned, also where the child was killed right after.
        imported: modules that the child had to import.
    """

    code: int
    output: str
    errors: str
    reported: bool
    imported: tuple[str, ...]


def why_not() -> str | None:
    """Return why calls cannot be watched here; None where they can."""
    if sys.platform != "linux" or _ARCHITECTURE is None:
        return "system calls are watched on Linux on x86-64 and ARM64"
    outcome = run_watched(lambda: None, Path("/nowhere"), lambda _: None)
    return None if outcome.code == 0 else f"the kernel lets nobody watch system calls here ({outcome.errors.strip()[-200:]})"


def run_watched(
    child: Callable[[], object], folder: Path, answer: Callable[[Call], Answer] | None, kill_after: float | None = None
) -> Outcome:
    """Fork, run a function in the child, and decide about each of its calls below a folder.

    Args:
        child: what it does.
        folder: the folder; calls on files elsewhere pass.
        answer: decides; None to watch nothing.
        kill_after: seconds after which the child is killed.

    Returns:
        How it ended.
    """
    ours, theirs = socket.socketpair()
    output, errors, reports = (os.memfd_create(name) for name in ("output", "errors", "reports"))
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run_child(child, theirs, (output, errors, reports), answer is not None)
    theirs.close()
    if answer is not None:
        _supervise(pid, ours, folder, answer, kill_after)
    elif kill_after is not None:
        _kill_later(pid, kill_after)
    _, status = os.waitpid(pid, 0)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # what it has started and left behind
    ours.close()
    said = [_everything(descriptor) for descriptor in (output, errors, reports)]
    return Outcome(os.waitstatus_to_exitcode(status), said[0], said[1], bool(said[2]), tuple(said[2].splitlines()[1:]))


def _everything(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, "rb") as file:
        return file.read().decode(errors="replace")


def _run_child(child: Callable[[], object], parent: socket.socket, files: tuple[int, int, int], watched: bool) -> None:
    code, known = FAILED, len(sys.modules)
    output, errors, reports = files
    gc.freeze()  # a library that collects garbage in a training would look at all that the parent has imported
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(errors, 2)
        # in the place of what a test has put there; the two are closed by no one
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        if watched:
            _ask_parent(parent)
        child()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        if code == 0:
            os.write(
                reports, b"done\n" + "\n".join(list(sys.modules)[known:]).encode()
            )  # as a caller would see it, before the end
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _ask_parent(parent: socket.socket) -> None:
    """Let the parent decide about every call in :data:`CALLS` from now on."""
    jumps = [struct.pack("HBBI", 0x15, 0, 1, number) + struct.pack("HBBI", 0x06, 0, 0, 0x7FC00000) for number in _NUMBERS]
    code = struct.pack("HBBI", 0x20, 0, 0, 0) + b"".join(jumps) + struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
    text = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(text)))
    _libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, without which only root may
    listener = _libc.syscall(_SECCOMP, 1, 8, program)
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    socket.send_fds(parent, [b"x"], [listener])
    os.close(listener)


def _supervise(pid: int, ours: socket.socket, folder: Path, answer: Callable[[Call], Answer], kill_after: float | None) -> None:
    ending = os.pidfd_open(pid)
    waiting = select.poll()
    waiting.register(ours, select.POLLIN)
    waiting.register(ending, select.POLLIN)
    ready = {descriptor for descriptor, _ in waiting.poll()}
    if ours.fileno() not in ready:
        os.close(ending)
        return
    _, (listener,), _, _ = socket.recv_fds(ours, 1, 1)
    waiting.unregister(ours)
    waiting.register(listener, select.POLLIN)
    prefix = str(folder)
    deadline = None if kill_after is None else time.monotonic() + kill_after
    try:
        while True:
            left = None if deadline is None else max(0, (deadline - time.monotonic()) * 1000)
            ready = dict(waiting.poll(left))
            if not ready:
                os.kill(pid, signal.SIGKILL)
                deadline = None
            elif ready.get(listener, 0) & select.POLLIN:
                if _decide(listener, prefix, answer) == KILL:
                    os.kill(pid, signal.SIGKILL)
            else:
                return
    finally:
        os.close(ending)
        os.close(listener)


def _decide(listener: int, folder: str, answer: Callable[[Call], Answer]) -> Answer:
    notice = bytearray(_NOTICE.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, notice)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINTR):  # it was killed meanwhile
            return None
        raise
    identity, pid, _, number, _, _, *arguments = _NOTICE.unpack(notice)
    call = _call(_NUMBERS[number], tuple(arguments), pid, folder)
    decided = answer(call) if call is not None else None
    if decided == KILL:
        return KILL  # the call is left unanswered: it is never made
    response = _ANSWER.pack(identity, 0, -(decided or 0), _CONTINUE if decided is None else 0)
    try:
        fcntl.ioctl(listener, _SEND, response)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
    return decided


def _call(name: str, arguments: tuple[int, ...], pid: int, folder: str) -> Call | None:
    paths: list[str | None] = []
    start = AT_FDCWD
    try:
        for kind, value in zip(CALLS[name][2], arguments, strict=False):
            if kind == "d":
                start = ctypes.c_int(value).value
            elif kind == "f":
                if (descriptor := ctypes.c_int(value).value) >= 0:
                    paths.append(_below(str(Path(f"/proc/{pid}/fd/{descriptor}").readlink()), folder))
            elif kind == "p":
                paths.append(_below(_path(pid, start, value), folder))
                start = AT_FDCWD
    except OSError:  # a descriptor that is not open, or a process that is gone
        return None
    if all(path is None for path in paths):
        return None
    return Call(name, tuple(paths), arguments, pid)


def _path(pid: int, start: int, address: int) -> str:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:  # noqa: PTH123
        file.seek(address)
        text = b""
        while b"\0" not in text and len(text) < 4096:
            block = file.read(256 - (address + len(text)) % 256)  # never across a page that is not there
            if not block:
                break
            text += block
    path = os.fsdecode(text.partition(b"\0")[0])
    if not path.startswith("/"):
        path = f"{Path(f'/proc/{pid}', 'cwd' if start == AT_FDCWD else f'fd/{start}').readlink()}/{path}"
    return os.path.normpath(path)


def _below(path: str, folder: str) -> str | None:
    if path == folder:
        return "."
    return path[len(folder) + 1 :] if path.startswith(folder + "/") else None


def _kill_later(pid: int, seconds: float) -> None:
    ending = os.pidfd_open(pid)
    if not select.select([ending], [], [], seconds)[0]:
        os.kill(pid, signal.SIGKILL)
    os.close(ending)
