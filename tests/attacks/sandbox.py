"""Attacks of a program on the sandbox, on its own tests and on the process that runs it: S3, S4 and
S5 of the review.
"""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from streamrl.envs.sandbox import limits, programs
from streamrl.envs.sandbox.limits import SandboxLimits
from streamrl.envs.sandbox.programs import ProgramResult
from tests.attacks.table import Attack
from tests.support.waiting import patience

WHERE = "envs/sandbox/programs.py"
TESTS = ("assert solve(2) == 4177909133", "assert solve(3) == 9091")
SECRET = "hunter2-of-the-env"
LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
CALL = (
    LIBC
    + "def call(*arguments):\n    ctypes.set_errno(0)\n    return libc.syscall(*map(ctypes.c_long,"
    " arguments)), ctypes.get_errno()\n"
)
# Numbers on x86_64 and aarch64 of calls that no program needs. Each must be refused before the
# kernel looks at its arguments.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "prctl": (157, 167),
    "seccomp": (317, 277),
    "setrlimit": (160, 164),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semctl": (66, 191),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "setxattr": (188, 5),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "utime": (132, None),
    "utimensat": (280, 88),
    "fchmod": (91, 52),
    "chmod": (90, None),
    "fchown": (93, 55),
    "fchmodat2": (452, 452),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "unlinkat": (263, 35),
    "renameat2": (316, 276),
    "linkat": (265, 37),
    "symlinkat": (266, 36),
    "mkdirat": (258, 34),
    "openat2": (437, 437),
    "open_by_handle_at": (304, 265),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "io_uring_setup": (425, 425),
    "clone": (56, 220),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "fsopen": (430, 430),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
    "syslog": (103, 116),
    "setuid": (105, 146),
    "capset": (126, 91),
    "personality": (135, 92),
    "inotify_init1": (294, 26),
    "timerfd_create": (283, 85),
    "signalfd4": (289, 74),
    "eventfd2": (290, 19),
    "flock": (73, 32),
}


def run(program: str, *tests: str, timeout_s: float = 30.0, memory_mib: int = 256) -> ProgramResult:
    return asyncio.run(programs.run(program, tests, SandboxLimits(patience(timeout_s), memory_mib)))


def forging(program: str) -> Callable[[Path], str]:
    """Can a program that solves nothing pass its tests?"""

    def attempt(directory: Path) -> str:
        outcome = run(program, *TESTS)
        return f"{sum(outcome.passed)} of {len(TESTS)} tests passed" if any(outcome.passed) else ""

    return attempt


def finding(program: str) -> Callable[[Path], str]:
    """Can a program find what its tests expect? It prints HARM when it has."""
    return lambda directory: harm_of(run(program + "\ndef solve(x): return look()", *TESTS))


def doing(program: str) -> Callable[[Path], str]:
    """Can a program do that? It prints HARM when it could; `VICTIM` and `FILE` are a process and a
    file that are not its own.
    """

    def attempt(directory: Path) -> str:
        file = directory / "precious"
        file.write_text(SECRET)
        file.chmod(0o644)
        os.utime(file, (1e9, 1e9))
        before = file.stat()
        victim = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            env={"STREAMRL_KAFKA_PASSWORD": SECRET},
        )
        try:
            outcome = run(f"VICTIM, FILE = {victim.pid}, {str(file)!r}\n{program}")
            if victim.poll() is not None:
                return f"another process ended with code {victim.returncode}"
        finally:
            victim.kill()
            victim.wait()
        after = file.stat()
        if (
            file.read_text() != SECRET
            or (after.st_mode, after.st_mtime) != (before.st_mode, before.st_mtime)
            or len(list(directory.iterdir())) > 1
        ):
            return "a file that is not its own has changed"
        return "a secret was printed" if SECRET in outcome.output else harm_of(outcome)

    return attempt


def harm_of(outcome: ProgramResult) -> str:
    return " ".join(line for line in outcome.output.splitlines() if line.startswith("HARM"))[:200]


def refused(directory: Path) -> str:
    """Is every call of the list refused, and not only its arguments?"""
    column = list(limits.AUDIT).index(platform.machine())
    numbers = {name: both[column] for name, both in REFUSED.items() if both[column] is not None}
    # Arguments that harm nobody where a call does get through: no process has this id, no
    # descriptor this number.
    loop = (
        f"for name, number in {numbers}.items():\n    if call(number, 2**30, 2**30, 0, 0, 0, 0) !="
        " (-1, 13): print('HARM', name)"
    )
    outcome = run(f"{CALL}{loop}\nprint('all tried')")
    return harm_of(outcome) or (
        ""
        if "all tried" in outcome.output
        else f"not all were tried: {outcome.end} {outcome.output[-200:]}"
    )


def waiting_for_input(directory: Path) -> str:
    outcome = run("input()")
    return "" if outcome.end == "error" else f"input() was waited for, end {outcome.end}"


def without(call: int) -> Callable[[Path], str]:
    """On a kernel that has not got this call: is a program run all the same?"""

    def attempt(directory: Path) -> str:
        filtered = f"""
import asyncio, struct
from streamrl.envs.sandbox import limits, programs
lines = [(limits.LOAD, 0, 0, limits.NUMBER), (limits.EQUAL, 0, 1, {call})]
lines.append((limits.RETURN, 0, 0, 0x00050000 | 38))
lines.append((limits.RETURN, 0, 0, limits.ALLOW))
limits.install_seccomp(b"".join(struct.pack("=HBBI", *line) for line in lines))
try:
    print("HARM", asyncio.run(programs.run("print('it ran')")))
except limits.NoSandbox as error:
    print("refused:", error)
"""
        line = [sys.executable, "-c", filtered]
        said = subprocess.run(
            line,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        return "" if said.stdout.startswith("refused:") else f"{said.stdout}{said.stderr}"[-200:]

    return attempt


def of_an_env(directory: Path) -> str:
    """Can another process of this user read the environment of one that has called `hide_memory`,
    as envs do?
    """
    code = (
        "from streamrl.system.hidden_memory import hide_memory; hide_memory(); print('ready',"
        " flush=True); input()"
    )
    line = [sys.executable, "-c", code]
    env = subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"STREAMRL_KAFKA_PASSWORD": SECRET}
    )
    try:
        assert env.stdout is not None
        assert env.stdout.readline() == b"ready\n"
        # root may read everybody's
        found = Path(f"/proc/{env.pid}/environ").read_bytes() if os.geteuid() else b""
        return "its password was read" if SECRET.encode() in found else ""
    except PermissionError:
        return ""
    finally:
        env.kill()
        env.communicate()


FRAMES = """
import sys
def look():
    frame = sys._getframe()
    while frame:
        if any(''.join(['4177', '909133']) in repr(value) for value in [*frame.f_locals.values()]):
            print('HARM: expected values in a frame')
        frame = frame.f_back
"""
OBJECTS = """
import gc
def look():
    for thing in gc.get_objects():
        if type(thing) in (str, bytes, list, dict, tuple):
            if ''.join(['4177', '909133']) in repr(thing)[:10000]:
                print('HARM: expected values in memory')
"""
MEMORY = """
def look():
    try: open('/proc/self/maps'); print('HARM: its maps are open')
    except OSError: pass
    import os
    for descriptor in range(3, 64):
        try: text = os.pread(descriptor, 10000, 0)
        except OSError: continue
        if b''.join([b'4177', b'909133']) in text: print('HARM: expected values in a descriptor')
"""
EVERY_PIPE = """
import os
lines = ('{"test": 0, "passed": true}', '{"test": 1, "passed": true}', '{"value": 4177909133}',
         '{"value": 9091}', '{"callable": true}')
for descriptor in range(64):
    for line in lines:
        try: os.write(descriptor, line.encode() + b'\\n')
        except OSError: pass
def solve(x): return 0
"""
EQUAL = """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def solve(x): return Equal(0)
"""
PATCHED = """
import builtins, json, runpy, sys
runpy.run_path = lambda *a, **k: {}
json.dumps = lambda *a, **k: '{"test": 0, "passed": true}'
builtins.compile = builtins.exec = lambda *a, **k: None
builtins.AssertionError = type('Fine', (BaseException,), {})
sys.modules['__main__'].__dict__['solve'] = lambda x: True
solve = type('Any', (), {'__call__': lambda self, x: self, '__eq__': lambda self, other: True})()
"""
LIES = """
def solve(x): raise SystemExit(0)
import os, atexit
atexit.register(lambda: os._exit(0))
"""
OWNER = """
import fcntl, os, time
r, w = os.pipe()
for steps in ((fcntl.F_SETOWN, VICTIM), (fcntl.F_SETSIG if hasattr(fcntl, 'F_SETSIG') else 10, 9),
              (fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)):
    try: fcntl.fcntl(r, *steps); print('HARM: fcntl', steps)
    except PermissionError: pass
os.write(w, b'x')
time.sleep(0.05)
"""
MEMORIES = """
import mmap, os
held = []
def more():
    try:
        held.append(os.open(f'/proc/self/fd/{os.memfd_create("x")}', os.O_RDWR))
        print('HARM: memfd')
    except OSError: pass
    for flags in (mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        held.append(mmap.mmap(-1, 32 << 20, flags)); held[-1].write(bytes(32 << 20))
try:
    for _ in range(16): more()
    print('HARM: 512 MiB under a limit of 256')
except (MemoryError, OSError): pass
"""
LIMITS = """
import os, resource
for of, what in ((VICTIM, resource.RLIMIT_NOFILE), (os.getppid(), resource.RLIMIT_NOFILE),
                 (0, resource.RLIMIT_AS)):
    try: resource.prlimit(of, what, (8, 8)); print('HARM: a limit was set of', of)
    except (PermissionError, ValueError): pass
try: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); print('HARM: no limit any more')
except (PermissionError, ValueError): pass
for attempt in (lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19),
                lambda: os.sched_setaffinity(os.getppid(), {0}),
                lambda: os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))):
    try: attempt(); print('HARM: another process is slowed down')
    except PermissionError: pass
"""
METADATA = """
import os
for attempt in (lambda: os.setxattr(FILE, 'user.note', b'x'), lambda: os.utime(FILE, (0, 0)),
                lambda: os.chmod(FILE, 0),
                lambda: os.fchmod(os.open(os.__file__, os.O_RDONLY), os.stat(os.__file__).st_mode),
                lambda: os.truncate(FILE, 0), lambda: os.remove(FILE),
                lambda: os.rename(FILE, FILE + '2'), lambda: os.link(FILE, FILE + '3'),
                lambda: open(FILE, 'a'),
                lambda: open('/dev/shm/streamrl-attack', 'w'), lambda: open(FILE + '4', 'x')):
    try: attempt(); print('HARM: a file was changed')
    except PermissionError: pass
"""
READING = """
import os, sys
for path in (FILE, f'/proc/{VICTIM}/environ', f'/proc/{os.getppid()}/environ',
             f'/proc/{os.getppid()}/mem', '/proc/self/environ', '/proc/self/mem', '/etc/passwd',
             '/proc/1/cmdline', '/dev/kmsg'):
    try: print('HARM:', path, open(path, 'rb').read(100))
    except OSError: pass
for path in ('/tmp', '/root', '/home', '/proc'):
    try: print('HARM:', path, os.listdir(path)[:3])
    except OSError: pass
"""
NETWORK = """
import os, socket, subprocess, threading
for attempt in (lambda: socket.socket(), lambda: socket.socket(socket.AF_UNIX),
                lambda: socket.socketpair(), lambda: os.fork(),
                lambda: subprocess.run(['/bin/true']), lambda: os.execv('/bin/true', ['true']),
                lambda: threading.Thread(target=print).start(),
                lambda: os.kill(VICTIM, 9), lambda: os.killpg(os.getpgid(os.getppid()), 0)):
    try: attempt(); print('HARM: it is not alone')
    except (PermissionError, RuntimeError, BlockingIOError): pass
"""
OUTLIVES = (
    CALL + f"if call({157 if platform.machine() == 'x86_64' else 167}, 1, 0, 0, 0, 0)[0] == 0:"
    " print('HARM: it outlives its env')"
)
TIME = (
    "import signal\nfor number in range(1, 32):\n    try: signal.signal(number, signal.SIG_IGN)\n  "
    "  except OSError: pass\nwhile True: pass"
)


def outstaying(directory: Path) -> str:
    outcome = run(TIME, timeout_s=0.5)
    return "" if outcome.end == "time" else f"end {outcome.end}"


def other_calls(directory: Path) -> str:
    """By the x32 numbering a list of numbers would be passed by."""
    outcome = run(f"{CALL}call(0x40000000 + 41, 2, 1, 0)\nprint('HARM: still here')")
    return harm_of(outcome) if platform.machine() == "x86_64" else ""


ATTACKS = (
    Attack("S3", "read the expected values in a frame", WHERE, finding(FRAMES)),
    Attack("S3", "read the expected values in memory", WHERE, finding(OBJECTS)),
    Attack("S3", "read the expected values in files and pipes", WHERE, finding(MEMORY)),
    Attack("S3", "write verdicts into every pipe", WHERE, forging(EVERY_PIPE)),
    Attack("S3", "return an object equal to everything", WHERE, forging(EQUAL)),
    Attack("S3", "patch what would run the tests", WHERE, forging(PATCHED)),
    Attack("S3", "end well before a test can fail", WHERE, forging(LIES)),
    Attack("S4", "make the kernel signal another process", WHERE, doing(OWNER)),
    Attack("S4", "take more memory than allowed", WHERE, doing(MEMORIES)),
    Attack("S4", "set limits and priorities of others", WHERE, doing(LIMITS)),
    Attack("S4", "change files and what is said of them", WHERE, doing(METADATA)),
    Attack("S4", "network, processes, threads, signals", WHERE, doing(NETWORK)),
    Attack("S4", "outlive the env", WHERE, doing(OUTLIVES)),
    Attack("S4", f"{len(REFUSED)} system calls that nobody needs", WHERE, refused),
    Attack("S4", "calls by another machine's numbers", WHERE, other_calls),
    Attack("S4", "wait for input that never comes", WHERE, waiting_for_input),
    Attack("S4", "ignore all signals and go on for ever", WHERE, outstaying),
    Attack("S5", "read files, environments and memory of others", WHERE, doing(READING)),
    Attack(
        "S5", "be run where there is no Landlock", WHERE, without(limits.LANDLOCK_CREATE_RULESET)
    ),
    Attack(
        "S5",
        "be run where there is no seccomp",
        WHERE,
        without({"x86_64": 157, "aarch64": 167}.get(platform.machine(), -1)),
    ),
    Attack("S5", "read an env's password in /proc", "envs/sandbox/limits.py", of_an_env),
)
