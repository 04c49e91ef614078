"""What a process may not do any more, decided by itself before it runs what it does not trust. Linux; standard library only, for it also runs alone:

    python -I -S limits.py MEMORY_BYTES CPU_S FILE [TEST ...]

runs FILE and then each TEST with the names that FILE has defined. It prints `SECRET ready` when it is held in, with ` but reads` behind it where the
kernel has no Landlock, and `SECRET passed INDEX` for each TEST that raised nothing; the secret is the first line of its input. It has no network,
starts no programs and no processes, signals nobody, writes, renames and removes no files, and opens none but those beside FILE and Python's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import runpy
import struct
import sys

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22
SECCOMP_MODE_FILTER, ALLOW, KILL, DENY = 2, 0x7FFF0000, 0x80000000, 0x00050000 | 13  # 13: EACCES
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # classic BPF: a word; jump if ==, >=, &; return
NUMBER, ARCHITECTURE, SECOND, THIRD = 0, 4, 24, 32  # where in struct seccomp_data: the call's number, the machine, low words of arguments
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # the same on every machine; Linux 5.13
EXECUTE, READ_FILE, READ_DIRECTORY, BENEATH = 1, 4, 8, 1
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")  # what modules of Python load
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# The calls that are refused, by machine; from 424 on Linux has the same numbers everywhere. `open` and `openat` only for writing.
EVERYWHERE = (424, 425, 426, 427, 434, 435, 437, 442, 452)  # pidfd_send_signal, io_uring (3), pidfd_open, clone3, openat2, mount_setattr, fchmodat2
MACHINES: dict[str, tuple[int, tuple[int, ...], int | None, int]] = {  # name: audit number, calls, open, openat
    "x86_64": (
        0xC000003E,
        (
            *(41, 53, 42, 49),  # socket, socketpair, connect, bind
            *(56, 57, 58, 59, 322),  # clone, fork, vfork, execve, execveat
            *(62, 200, 234, 129, 297, 101, 310, 311),  # kill, tkill, tgkill, rt_(tg)sigqueueinfo, ptrace, process_vm_readv, process_vm_writev
            *(29, 64, 68),  # shmget, semget, msgget: they would stay behind
            *(76, 82, 83, 84, 85, 86, 87, 88, 90, 92, 94, 133),  # truncate, rename, mkdir, rmdir, creat, (un)link, symlink, chmod, (l)chown, mknod
            *(258, 259, 260, 263, 264, 265, 266, 268, 316),  # the same with -at
            *(161, 165, 272, 308),  # chroot, mount, unshare, setns
        ),
        2,
        257,
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(198, 199, 203, 200),
            *(220, 221, 281),
            *(129, 130, 131, 138, 240, 117, 270, 271),
            *(194, 190, 186),
            *(45, 33, 34, 35, 36, 37, 38, 276, 53, 54),
            *(51, 40, 97, 268),
        ),
        None,
        56,
    ),
}


def memory(limit_bytes: int) -> None:
    """More than so much address space is a MemoryError."""
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


def processor(limit_s: int) -> None:
    """More than so much time at work ends the process."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))


def die_with_parent() -> None:
    """SIGKILL when the process that started this one ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)


def alone() -> None:
    """From now on no network, no other processes or programs, no files written. Cannot be undone. Raises OSError where the kernel will not."""
    if platform.machine() not in MACHINES:
        raise OSError(f"no list of system calls for {platform.machine()}; there is one for {', '.join(MACHINES)}")
    code = program(*MACHINES[platform.machine()])
    libc, buffer = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(code)

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    filtered = Program(len(code) // 8, ctypes.addressof(buffer))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filtered), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")


def reads_only(*paths: str) -> bool:
    """From now on it opens only what lies in these directories, or these files; that others exist it can still see. Cannot be undone.

    By Landlock, which every user may use. Returns False, and changes nothing, where the kernel has none. Raises OSError where it refuses.
    """
    libc, rights = ctypes.CDLL(None, use_errno=True), EXECUTE | READ_FILE | READ_DIRECTORY

    def call(number: int, *arguments: object) -> int:
        return libc.syscall(ctypes.c_long(number), *arguments)

    handled = struct.pack("=Q", rights)
    rules = call(LANDLOCK_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), ctypes.c_uint(0))
    if rules < 0:
        return False
    for path in filter(os.path.exists, paths):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = struct.pack("=Qi", rights if os.path.isdir(path) else rights & ~READ_DIRECTORY, place)
        if call(LANDLOCK_ADD_RULE, ctypes.c_int(rules), ctypes.c_int(BENEATH), allowed, ctypes.c_uint(0)):
            raise OSError(ctypes.get_errno(), "Landlock takes no rule for", path)
        os.close(place)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or call(LANDLOCK_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint(0)):
        raise OSError(ctypes.get_errno(), "Landlock refuses to restrict this process")
    os.close(rules)
    return True


def program(architecture: int, calls: tuple[int, ...], opens: int | None, opens_at: int) -> bytes:
    """The filter: struct sock_filter after struct sock_filter. Another machine's calls (32 bits on 64, x32) end the process."""
    refused = (*calls, *EVERYWHERE)
    lines: list[tuple[int, int, int, int]] = [  # code, how many to skip if so, if not, value
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, 0x40000000),
        (RETURN, 0, 0, KILL),
    ]
    for call in refused:
        lines += [(EQUAL, 0, 1, call), (RETURN, 0, 0, DENY)]
    for call, flags in ((opens, SECOND), (opens_at, THIRD)):
        if call is not None:
            lines += [(EQUAL, 0, 4, call), (LOAD, 0, 0, flags), (ANY_BIT, 0, 1, WRITING), (RETURN, 0, 0, DENY), (RETURN, 0, 0, ALLOW)]
    lines.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def main(memory_bytes: int, cpu_s: int, file: str, tests: list[str]) -> None:
    secret = sys.stdin.readline().strip()
    die_with_parent()
    processor(cpu_s)
    memory(memory_bytes)
    held = reads_only(os.path.dirname(os.path.abspath(file)), os.path.dirname(os.__file__), os.path.join(sys.base_prefix, "lib"), *LIBRARIES)
    alone()
    print(f"{secret} ready{'' if held else ' but reads'}", flush=True)
    names = runpy.run_path(file)
    sys.stdout.flush()
    for index, test in enumerate(tests):
        with contextlib.suppress(Exception):
            runpy.run_path(test, dict(names))
            print(f"\n{secret} passed {index}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
