"""Host b in a process of its own, which serves three regions over rxe_b0 and rxe_b1.

The processes are forked before the tests begin. On an emulated processor a new process would import for ten seconds,
and a later fork would inherit its parent's devices and the locks of its parent's threads."""

from __future__ import annotations

import itertools
import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

import xxhash

from pinyon.transfer import Access, Network, TransferEngine
from pinyon.transfer.transports.rdma import server  # noqa: F401 - what the engine imports at its start
from tests.rdma.inside.rdma_nics import rdma_nic

SPARES = 3
ACCESS = (Access.READ_WRITE, Access.READ, Access.NONE)

_spares: list[tuple[ForkProcess, Connection]] = []
"""All forked processes. Used ones stay here with their open files, which some tests count."""
_unused = itertools.count()


def fork_spares() -> None:
    """Forks the processes, while this one has a single thread and no open device."""
    context = multiprocessing.get_context("fork")
    while len(_spares) < SPARES:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        _spares.append((process, ours))


def spare() -> tuple[ForkProcess, Connection]:
    """Returns a process that waits for a size and a secret.

    It answers with its segment and its regions' keys, and then answers every message, a command and the number of a
    region, until the pipe is closed."""
    number = next(_unused)
    assert number < SPARES, f"more than {SPARES} hosts b"
    return _spares[number]


def _serve(asked: Connection) -> None:
    try:
        size, secret = asked.recv()
    except EOFError:
        return
    with TransferEngine(
        network=Network([rdma_nic("b0"), rdma_nic("b1")]), secret=secret, transports=("rdma",)
    ) as engine:
        buffers = [bytearray(b"\x5a") * size for _ in ACCESS]
        regions = [
            engine.register_local_memory(buffer, access=access) for buffer, access in zip(buffers, ACCESS, strict=True)
        ]
        asked.send((engine.descriptor(), [region.key for region in regions]))
        while (message := asked.recv()) is not None:
            command, number = message
            if command == "unregister":
                engine.unregister(regions[number])
            elif command == "register":
                buffers.append(bytearray(b"\x5a") * size)
                regions.append(engine.register_local_memory(buffers[-1]))
                asked.send(regions[-1].key.hex())
                continue
            asked.send(xxhash.xxh3_128_hexdigest(buffers[number]))
