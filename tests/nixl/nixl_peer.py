"""A peer process for the tests of the real NIXL: prints what it offers as JSON, then obeys lines on stdin."""

from __future__ import annotations

import json
import mmap
import sys
import time

from pinyon.transfer import Access, TransferEngine, TransferLimits, Transports
from tests.nixl.conftest import FETCHED
from tests.segments import text_of

PATTERN = bytes(range(251))
SIZE = 8 << 20
PATIENT = TransferLimits(stall_s=120.0, connect_s=120.0, base_deadline_s=120.0)


def main() -> None:
    assert str(FETCHED) in sys.path or not FETCHED.is_dir()
    with TransferEngine(transports=Transports(("tcp",), nixl="prefer"), limits=PATIENT) as engine:
        memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory[:] = (PATTERN * (SIZE // len(PATTERN) + 1))[:SIZE]
        region = engine.register_local_memory(memory, access=Access.NONE)
        held = bytearray(PATTERN * 4)
        kept = engine.register_local_memory(held)
        grant = engine.grant(region, [(0, SIZE)], Access.READ)
        print(json.dumps([text_of(engine.descriptor()), grant.key.hex(), kept.key.hex()]), flush=True)
        for line in sys.stdin:
            match line.split():
                case ["revoke"]:
                    engine.revoke(grant)
                    memory[:] = b"\xff" * SIZE  # the memory serves other data now
                case ["unmap"]:
                    engine.unregister(region)
                    del region, grant
                    memory.close()
                case ["idle"]:
                    began = time.process_time()
                    time.sleep(1.0)  # the measured period
                    print(time.process_time() - began, flush=True)
                    continue
                case ["again", start]:
                    engine.unregister(kept)
                    kept = engine.register_local_memory(memoryview(held)[int(start) :])
                    print(kept.key.hex(), flush=True)
                    continue
            print("done", flush=True)


if __name__ == "__main__":
    main()
