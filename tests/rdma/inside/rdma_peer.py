"""Host b in a process of its own: ``rdma_peer.py SIZE SECRET`` serves three regions over rxe_b0 and rxe_b1.

It prints its segment and the regions' keys as JSON, then answers one line per line of standard input until that ends.
"""

from __future__ import annotations

import json
import sys

import xxhash

from pinyon.transfer import Access, TransferEngine
from tests.rdma.inside.rdma_nics import rdma_nic

ACCESS = (Access.READ_WRITE, Access.READ, Access.NONE)


def main() -> None:
    size, secret = int(sys.argv[1]), sys.argv[2].encode()
    with TransferEngine(nics=[rdma_nic("b0"), rdma_nic("b1")], secret=secret or None, transports=("rdma",)) as engine:
        buffers = [bytearray(b"\x5a") * size for _ in ACCESS]
        regions = [
            engine.register_local_memory(buffer, access=access) for buffer, access in zip(buffers, ACCESS, strict=True)
        ]
        keys = [region.key.hex() for region in regions]
        print(json.dumps([engine.descriptor().to_dict(), keys]), flush=True)
        for line in sys.stdin:
            command, number = line.split()
            if command == "unregister":
                engine.unregister(regions[int(number)])
            elif command == "register":
                buffers.append(bytearray(b"\x5a") * size)
                regions.append(engine.register_local_memory(buffers[-1]))
                print(regions[-1].key.hex(), flush=True)
                continue
            print(xxhash.xxh3_128_hexdigest(buffers[int(number)]), flush=True)


if __name__ == "__main__":
    main()
