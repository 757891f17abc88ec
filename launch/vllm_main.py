"""vLLM's command line in a process that ends with its parent; run by the Python that has vLLM."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from pinyon.runtime.service import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(os.environ.pop("PINYON_PARENT_PID")))
    sys.argv[0] = "vllm"
    sys.exit(import_module("vllm.entrypoints.cli.main").main())
