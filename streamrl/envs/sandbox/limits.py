"""Confines a process before it handles unreviewed text. This works on Linux only, and
needs the standard library only.

`confine` applies an allow-list of system calls (seccomp), an allow-list of files (Landlock), no
capabilities, and limits on memory, processor time and file sizes. None of it can be undone. Every
step that fails raises, so a process that continues is confined. The process must have a single
thread.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

PR_SET_PDEATHSIG = 1
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
ALLOW = 0x7FFF0000
KILL = 0x80000000  # the whole process
DENY = 0x00050000 | 13  # the call fails with EACCES
# Classic BPF: load a word; jump if equal, if at least, if any bit is set; return.
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
ANY_BIT = 0x45
RETURN = 0x06
# offsets in struct seccomp_data
NUMBER = 0
ARCHITECTURE = 4
ARGUMENT = 16  # of the first argument; each has 8 bytes, the low word first
CAPABILITY_VERSION = 0x20080522

# The system calls of Landlock, since Linux 5.13.
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
LANDLOCK_VERSION = 1  # flag: answer the ABI
RULE_PATH_BENEATH = 1
READ_FILE = 1 << 2
READ_DIRECTORY = 1 << 3
# All rights that the kernel knows, from each version of the ABI on.
FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
NET_RIGHTS = {1: 0, 4: 0b11}  # bind and connect TCP
SCOPES = {1: 0, 6: 0b11}  # abstract UNIX sockets and signals
RULESET_BYTES = {1: 8, 4: 16, 6: 24}

# Where modules of Python and their libraries are loaded from.
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# The ioctl requests TCGETS, TIOCGWINSZ, FIONREAD, FIONCLEX, FIOCLEX.
TERMINAL = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)
DESCRIPTOR = (0, 1, 2, 3, 1030)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
ADVICE = tuple(range(26))  # up to MADV_COLLAPSE; those from 100 on damage memory

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# The calls that are allowed whatever their arguments: their numbers on x86_64 and on aarch64. None
# means that the machine has no such call.
CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "poll": (7, None),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "pread64": (17, 67),
    "readv": (19, 65),
    "writev": (20, 66),
    "access": (21, None),
    "pipe": (22, None),
    "select": (23, None),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "dup": (32, 23),
    "dup2": (33, None),
    "pause": (34, None),
    "nanosleep": (35, 101),
    "getitimer": (36, 102),
    "alarm": (37, None),
    "setitimer": (38, 103),
    "getpid": (39, 172),
    "exit": (60, 93),
    "uname": (63, 160),
    "getcwd": (79, 17),
    "readlink": (89, None),
    "gettimeofday": (96, 169),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "getpgrp": (111, None),
    "getgroups": (115, 158),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "rt_sigpending": (127, 136),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "time": (201, None),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "getdents64": (217, 61),
    "restart_syscall": (219, 128),
    "fadvise64": (221, 223),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "newfstatat": (262, 79),
    "readlinkat": (267, 78),
    "faccessat": (269, 48),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "dup3": (292, 24),
    "pipe2": (293, 59),
    "getcpu": (309, 168),
    "getrandom": (318, 278),
    "statx": (332, 291),
    "close_range": (436, 436),
    "faccessat2": (439, 439),
}
# Calls that are allowed if an argument is one of these values: numbers, its index, the values.
ONE_OF = {
    "ioctl": ((16, 29), 1, TERMINAL),
    "fcntl": ((72, 25), 1, DESCRIPTOR),
    "madvise": ((28, 233), 2, ADVICE),
}
# Calls that open files: numbers, and the index of the flags, which must not ask to write.
OPENING = {"open": ((2, None), 1), "openat": ((257, 56), 2)}
PRLIMIT64 = (302, 261)  # allowed only to read a limit of the process's own
MIB = 1 << 20


class NoSandbox(OSError):
    """This kernel cannot confine a process."""


class SandboxLimits(NamedTuple):
    """What a confined process may use."""

    timeout_s: float = 5.0  # it is ended from outside; its processor time is limited as well
    memory_mib: int = 256
    allow_reading: bool = False  # accepts a kernel without Landlock, where it can read files

    def dump(self) -> str:
        """The limits as an argument of a command line."""
        return json.dumps(self)

    @classmethod
    def parse(cls, text: str) -> SandboxLimits:
        return cls(*json.loads(text))


Line = tuple[int, int, int, int]  # code, how many lines to skip if so, if not, value


def confine(limits: SandboxLimits, paths: Sequence[str]) -> None:
    """Confine this process: from now on it can only compute, and read what is beneath `paths` and
    in Python's own libraries.

    With `allow_reading` a kernel without Landlock is accepted, where every file of this user can be
    read. Raises NoSandbox, or OSError for what the kernel refuses.
    """
    die_with_parent()
    _limit(resource.RLIMIT_AS, limits.memory_mib * MIB)
    _limit(resource.RLIMIT_CPU, int(limits.timeout_s) + 1)
    for what in (
        resource.RLIMIT_FSIZE,
        resource.RLIMIT_CORE,
        resource.RLIMIT_NPROC,
        resource.RLIMIT_MEMLOCK,
        resource.RLIMIT_MSGQUEUE,
    ):
        _limit(what, 0)
    _limit(resource.RLIMIT_NOFILE, 64)
    if landlock_abi() or not limits.allow_reading:
        landlock_read_only(
            os.path.dirname(os.__file__), os.path.join(sys.base_prefix, "lib"), *LIBRARIES, *paths
        )
    drop_capabilities()
    seccomp_lockdown()


def require_sandbox(allow_reading: bool = False) -> None:
    """Raise NoSandbox if `confine` would, as far as that can be known without confining."""
    if sys.platform != "linux" or platform.machine() not in AUDIT:
        raise NoSandbox(
            f"there is no sandbox for {platform.machine()} under {sys.platform}; "
            f"there is one for {', '.join(AUDIT)} under linux"
        )
    if not (allow_reading or landlock_abi()):
        raise NoSandbox(
            "this kernel has no Landlock (Linux 5.13 and later; `lsm=` of the kernel's command "
            "line or a container's seccomp profile may switch it off), so untrusted text could "
            "read this user's files; use another kernel, or accept that with "
            "`allow_reading: true` among its params"
        )


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)


def landlock_abi() -> int:
    """The version of Landlock that the kernel has; 0 if it has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(
        libc.syscall(
            ctypes.c_long(LANDLOCK_CREATE_RULESET),
            None,
            ctypes.c_size_t(0),
            ctypes.c_uint(LANDLOCK_VERSION),
        ),
        0,
    )


def landlock_read_only(*paths: str) -> None:
    """Let this process open only these files and the files in these directories, and only to read.

    Landlock handles every right that the kernel knows: nothing is written, made, removed, renamed,
    truncated or executed, no TCP port is bound or connected to, and no process outside is
    signalled. The process can still see that other files exist. Raises NoSandbox if the kernel has
    no Landlock.
    """
    require_sandbox()
    libc = ctypes.CDLL(None, use_errno=True)
    abi = landlock_abi()

    def call(number: int, *arguments: object) -> int:
        return libc.syscall(ctypes.c_long(number), *arguments)

    handled = struct.pack(
        "=QQQ", _since(FILE_RIGHTS, abi), _since(NET_RIGHTS, abi), _since(SCOPES, abi)
    )
    rules = call(
        LANDLOCK_CREATE_RULESET,
        handled,
        ctypes.c_size_t(_since(RULESET_BYTES, abi)),
        ctypes.c_uint(0),
    )
    if rules < 0:
        raise NoSandbox(ctypes.get_errno(), "Landlock makes no rules")
    for path in filter(os.path.exists, paths):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = READ_FILE
        if os.path.isdir(path):
            rights |= READ_DIRECTORY
        allowed = struct.pack("=Qi", rights, descriptor)
        if call(
            LANDLOCK_ADD_RULE,
            ctypes.c_int(rules),
            ctypes.c_int(RULE_PATH_BENEATH),
            allowed,
            ctypes.c_uint(0),
        ):
            raise NoSandbox(ctypes.get_errno(), "Landlock takes no rule for", path)
        os.close(descriptor)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or call(
        LANDLOCK_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint(0)
    ):
        raise NoSandbox(ctypes.get_errno(), "Landlock refuses to restrict this process")
    os.close(rules)


def drop_capabilities() -> None:
    """Take away all capabilities. Root keeps its user id and nothing else of its power."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(struct.pack("=Ii", CAPABILITY_VERSION, 0), struct.pack("=6I", *[0] * 6)):
        raise NoSandbox(ctypes.get_errno(), "the kernel does not take its capabilities away")


def seccomp_lockdown() -> None:
    """Let this process make only the system calls above: no network, no process or program, no
    signal, and nothing written but pipes.
    """
    machine = platform.machine()
    require_sandbox(allow_reading=True)
    install_seccomp(seccomp_program(AUDIT[machine], list(AUDIT).index(machine)))


def install_seccomp(code: bytes) -> None:
    """Put this filter on the process's system calls. Raises NoSandbox."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(code)

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    filtered = Program(len(code) // 8, ctypes.addressof(buffer))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filtered), 0, 0
    ):
        raise NoSandbox(ctypes.get_errno(), "the kernel takes no seccomp filter")


def seccomp_program(architecture: int, column: int) -> bytes:
    """The seccomp filter, as an array of struct sock_filter. Calls of another machine (those of 32
    bits on 64, x32) end the process.

    `column` is the index of this machine's number of each call in the tables.
    """
    lines: list[Line] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, 0x40000000),
        (RETURN, 0, 0, KILL),
    ]
    for numbers in CALLS.values():
        lines += _when(numbers[column], [(RETURN, 0, 0, ALLOW)])
    for numbers, index, values in ONE_OF.values():
        equal: list[Line] = [
            line for value in values for line in ((EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW))
        ]
        lines += _when(
            numbers[column], [(LOAD, 0, 0, ARGUMENT + 8 * index), *equal, (RETURN, 0, 0, DENY)]
        )
    for numbers, index in OPENING.values():
        flags: list[Line] = [
            (LOAD, 0, 0, ARGUMENT + 8 * index),
            (ANY_BIT, 0, 1, WRITING),
            (RETURN, 0, 0, DENY),
            (RETURN, 0, 0, ALLOW),
        ]
        lines += _when(numbers[column], flags)
    # the pid must be 0 (this process), and the new limit, a pointer of 64 bits, must be null
    zeros = (ARGUMENT, ARGUMENT + 16, ARGUMENT + 20)
    read: list[Line] = [
        line
        for offset in zeros
        for line in ((LOAD, 0, 0, offset), (EQUAL, 1, 0, 0), (RETURN, 0, 0, DENY))
    ]
    lines += _when(PRLIMIT64[column], [*read, (RETURN, 0, 0, ALLOW)])
    lines.append((RETURN, 0, 0, DENY))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _when(call: int | None, then: list[Line]) -> list[Line]:
    """The lines `then` for this call, jumped over for others. The number of the call must have been
    loaded, and `then` must end with a return.
    """
    return [] if call is None else [(EQUAL, 0, len(then), call), *then]


def _since(values: dict[int, int], abi: int) -> int:
    """The value of the newest version that is not above `abi`."""
    return values[max(version for version in values if version <= abi)]


def _limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, value))
