"""vLLM's command line in a process that ends with its parent; run by the Python that has vLLM."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from importlib import import_module

from pinyon.runtime.service import die_with_parent

GRACE_S = 10.0


def end_after(parent_pid: int) -> None:
    """Ends all processes of the server some seconds after its parent: while vLLM starts, it does not heed SIGTERM."""
    while os.getppid() == parent_pid:
        time.sleep(1.0)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    parent = int(os.environ.pop("PINYON_PARENT_PID"))
    die_with_parent(parent)
    if os.getpgrp() == os.getpid():
        threading.Thread(target=end_after, args=(parent,), daemon=True).start()
    sys.argv[0] = "vllm"
    sys.exit(import_module("vllm.entrypoints.cli.main").main())
