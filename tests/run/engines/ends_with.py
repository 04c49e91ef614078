"""Stands for the parts of a machine: `python -m tests.run.engines.ends_with CODE` ends with that
exit code, with `--on-signal` not before SIGTERM.
"""

import signal
import sys
import threading

from streamrl.system.signals import stop_on

if __name__ == "__main__":
    stop = stop_on([signal.SIGTERM]) if "--on-signal" in sys.argv else threading.Event()
    if "--on-signal" in sys.argv:
        print("started", flush=True)
        stop.wait(60)
        print("ended", flush=True)
    sys.exit(int(sys.argv[1]))
