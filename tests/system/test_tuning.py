from __future__ import annotations

import os
import subprocess
import sys

import pytest

from streamrl.system.tuning import YOUNG_OBJECTS


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the kernel has no such policy")
def test_a_process_that_moves_data_interrupts_nobody():
    settled = (
        "from streamrl.system.tuning import tune_process; tune_process(); import os;"
        " print(os.sched_getscheduler(0))"
    )
    assert int(subprocess.check_output([sys.executable, "-c", settled])) == os.SCHED_BATCH


def test_the_command_collects_seldom_from_its_start_on():
    settled = (
        "import gc, sys; from streamrl.cli import main; sys.argv = ['streamrl', '--version'];"
        " import atexit; atexit.register(lambda: print(gc.get_threshold()[0])); main()"
    )
    printed = subprocess.check_output([sys.executable, "-c", settled], text=True)
    assert int(printed.split()[-1]) == YOUNG_OBJECTS


@pytest.mark.skipif(sys.platform != "linux", reason="the sizes are those of glibc, as Linux has it")
def test_a_process_that_holds_a_model_gives_back_the_arrays_that_it_frees():
    kept = (
        "import numpy as np, psutil;"
        " from streamrl.system.tuning import tune_process, return_freed_arrays;"
        " tune_process(); return_freed_arrays();"
        " arrays = [np.ones(1 << 20) for _ in range(32)];"  # 8 MiB each
        " held = psutil.Process().memory_info().rss;"
        " arrays = arrays[-1:];"  # the last one keeps the heap from shrinking
        " print((held - psutil.Process().memory_info().rss) >> 20)"
    )
    assert int(subprocess.check_output([sys.executable, "-c", kept])) > 200


def test_a_server_may_have_as_many_descriptors_as_the_system_allows():
    raised = (
        "import resource as r; from streamrl.system.tuning import raise_descriptor_limit;"
        " hard = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (64, hard));"
        " print(raise_descriptor_limit() > 64, r.getrlimit(r.RLIMIT_NOFILE)[0] == hard)"
    )
    assert subprocess.check_output([sys.executable, "-c", raised]) == b"True True\n"
