"""A peer process: ``main([SIZE, SECRET])`` prints its segment and serves until its stdin closes."""

import sys

from pinyon.transfer import TransferEngine, TransferLimits
from tests.segments import text_of

PATIENT = TransferLimits(stall_s=120.0, connect_s=120.0, base_deadline_s=120.0)


def main(arguments: list[str]) -> None:
    size, secret = int(arguments[0]), arguments[1].encode()
    with TransferEngine(secret=secret or None, limits=PATIENT) as engine:
        engine.register_local_memory(bytearray(b"\x5a") * size)
        print(text_of(engine.descriptor()), flush=True)
        sys.stdin.read()
