"""A peer process that is reached by shm alone.

``main([SIZE, SECRET])`` prints its segment as JSON and then obeys commands, a line of JSON each, until its stdin
closes. Each command is answered by a line of JSON, ``reuse`` by several."""

import itertools
import json
import os
import select
import sys
import threading

from pinyon.transfer import Access, SegmentDescriptor, TransferLimits
from pinyon.transfer.links.acceptor import Acceptor
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.handshake import Service
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.transports.shm.transport import ShmTransport
from tests.segments import text_of

GOOD, BAD = 0x11, 0xEE
PATIENT = TransferLimits(stall_s=120.0, connect_s=120.0, base_deadline_s=120.0)


def reuse(memory: MemoryTable, buffer: bytearray) -> None:
    """Registers, unregisters and overwrites the same memory until another command comes; prints each key on a line."""
    view = memoryview(buffer)
    good, bad = bytes([GOOD]) * len(view), bytes([BAD]) * len(view)
    tick = threading.Event()
    for number in itertools.count():
        if select.select([sys.stdin], [], [], 0)[0]:
            break
        view[:] = good
        region = memory.register(view, "cpu:0", Access.READ_WRITE)
        print(json.dumps(region.key.hex()), flush=True)
        tick.wait(0.0003 * (number % 8))  # makes READs meet the end of the region at different places
        memory.unregister(region, 1.0)
        view[:] = bad
    sys.stdin.readline()
    print(json.dumps(""), flush=True)


def main(arguments: list[str]) -> None:
    size, secret = int(arguments[0]), arguments[1].encode() or None
    memory = MemoryTable()
    context = EngineContext(os.urandom(16), memory, PATIENT, secret)
    meter = context.meter
    transport = ShmTransport(context)
    acceptor = Acceptor(context, {Service.SHM: transport.service})
    acceptor.listen_unix(transport.address)
    buffer = bytearray(b"\x5a") * size
    region = memory.register(buffer, "cpu:0", Access.READ_WRITE)
    segment = SegmentDescriptor("127.0.0.1", 1, context.boot_id, (region.descriptor(),), shm=transport.address)
    print(json.dumps(text_of(segment)), flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer: object = None
        if command == "peek":
            start, end = arguments
            answer = buffer[start:end].hex()
        elif command == "poke":
            start, data = arguments
            buffer[start : start + len(data) // 2] = bytes.fromhex(data)
        elif command == "register":
            size, access = arguments
            answer = memory.register(bytearray(b"\x33") * size, "cpu:0", Access(access)).key.hex()
        elif command == "unregister":
            memory.unregister(memory.get(bytes.fromhex(arguments[0])), 1.0)
        elif command == "reuse":
            reuse(memory, bytearray(arguments[0]))
            continue
        elif command == "drop":
            for link in list(acceptor._inbound):
                link.abort()
                link.thread.join()
        elif command == "close":
            transport.close()
        elif command == "become":
            os.setuid(arguments[0])
        elif command == "state":
            counts = meter.stats.protocol_errors, meter.stats.auth_failures
            answer = [acceptor.links, *counts, len(os.listdir("/proc/self/fd"))]
        print(json.dumps(answer), flush=True)
    transport.close()
    acceptor.close()


if __name__ == "__main__":
    main(sys.argv[1:])
