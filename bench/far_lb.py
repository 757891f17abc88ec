"""A load balancer with some far instances: ``python -m bench.far_lb --far PREFIX=MILLISECONDS,...``, and the arguments
of ``services.lb``. The time is one way, to instances whose ids begin with the prefix."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import BinaryIO

from launch.process import Child, start_module
from pinyon.runtime.channel import Channels, OpenSession
from pinyon.runtime.distance import delayed, parse_delays
from services.lb.__main__ import main


def launch_far(
    module: str, arguments: Sequence[str], log: BinaryIO | None, ready_fd: int, more_fds: Sequence[int] = ()
) -> Child:
    """Starts a service as the launcher does, but this module in place of a load balancer."""
    return start_module("bench.far_lb" if module == "services.lb" else module, arguments, log, ready_fd, more_fds)


def run(argv: Sequence[str]) -> None:
    at = argv.index("--far")
    delays_s = parse_delays(argv[at + 1])
    near = Channels.sessions_to

    def sessions_to(self: Channels, name: str) -> OpenSession:
        fitting = [seconds for prefix, seconds in delays_s.items() if name.startswith(prefix)]
        return delayed(near(self, name), max(fitting, default=0.0))

    Channels.sessions_to = sessions_to  # type: ignore[method-assign]
    main([*argv[:at], *argv[at + 2 :]])


if __name__ == "__main__":
    run(sys.argv[1:])
