"""Messages that no service of ours would send: random bytes, and valid messages with a change."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.api.kvstore.v1 import kvstore_pb2
from pinyon.api.lb.v1 import lb_pb2
from pinyon.api.worker.v1 import worker_pb2

MAX_TOKENS = 12
"""The limit on generated tokens, which no change of a message exceeds."""

_SERVICES = {
    "conductor": (conductor_pb2, ("ConductorService",)),
    "kvstore-0": (kvstore_pb2, ("KvStoreService", "BlockReadService")),
    "prefill-0": (worker_pb2, ("WorkerService",)),
    "decode-0": (worker_pb2, ("WorkerService",)),
    "lb-0": (lb_pb2, ("LbService",)),
}


@dataclass(frozen=True)
class Target:
    """A method of one process."""

    process: str
    method: MethodDescriptor

    @property
    def path(self) -> str:
        return f"/{self.method.containing_service.full_name}/{self.method.name}"

    @property
    def request(self) -> type[Message]:
        return self.method.input_type._concrete_class

    @property
    def kind(self) -> str:
        sides = ("stream" if each else "unary" for each in (self.method.client_streaming, self.method.server_streaming))
        return "_".join(sides)


METHODS = [
    Target(process, method)
    for process, (module, names) in _SERVICES.items()
    for name in names
    for method in module.DESCRIPTOR.services_by_name[name].methods
] + [Target(process, kvstore_pb2.DESCRIPTOR.services_by_name["BlockReadService"].methods_by_name[name])
     for process in ("prefill-0", "decode-0") for name in ("Acquire", "Release")]  # fmt: skip


class Kept:
    """Values with which messages are valid in this cluster."""

    def __init__(self, random_: random.Random, instances: Iterable[conductor_pb2.Instance]) -> None:
        self.random = random_
        infos = {each.info.instance_id: each.info for each in instances}
        self.worker = infos["decode-0"]
        self.prefill = infos["prefill-0"]

    def keys(self, count: int) -> bytes:
        return self.random.randbytes(16 * count)

    def tokens(self, count: int) -> bytes:
        return b"".join(self.random.randrange(256).to_bytes(4, "little") for _ in range(count))

    def sampling(self) -> common_pb2.SamplingParams:
        return common_pb2.SamplingParams(max_tokens=self.random.randint(1, MAX_TOKENS), temperature=1, seed=7)

    def placement(self) -> common_pb2.Placement:
        return common_pb2.Placement(
            prefill_instance_id=self.prefill.instance_id,
            prefill_address=self.prefill.address,
            decode_instance_id=self.worker.instance_id,
            decode_address=self.worker.address,
            fetches=[
                common_pb2.FetchSpan(
                    source_id="s", source_address=self.prefill.address, first_block=0, block_count=1,
                    source=common_pb2.KV_SOURCE_PEER,
                )
            ],
        )  # fmt: skip

    def request_class(self) -> common_pb2.RequestClass:
        return common_pb2.RequestClass(kind="chat", turn=1, session="s", user="u", geographies=["eu-west"])

    def segment(self) -> common_pb2.Segment:
        """Returns the segment of a peer that does not exist."""
        return common_pb2.Segment(host="127.0.0.1", port=1, boot_id=self.random.randbytes(8).hex(), host_id="elsewhere")

    def region(self) -> common_pb2.Region:
        return common_pb2.Region(key=self.random.randbytes(16), location="cpu:0", length_bytes=1 << 20)

    # -- one valid message of each kind

    def valid(self, request: type[Message]) -> Message:
        make: dict[Any, Callable[[], Message]] = {
            conductor_pb2.ScheduleRequest: self.schedule,
            conductor_pb2.ScheduleSessionRequest: lambda: request(
                lb_id="hostile", requests=[self.schedule() for _ in range(3)], released_request_ids=["r1", "r2"]
            ),
            conductor_pb2.ReportSessionRequest: self.report,
            conductor_pb2.LookupBlocksRequest: lambda: request(block_keys=self.keys(4)),
            conductor_pb2.ReleaseRequest: lambda: request(request_id="r1"),
            conductor_pb2.ListInstancesRequest: lambda: request(role=1),
            conductor_pb2.ExplainRequest: lambda: request(request_id="r1"),
            kvstore_pb2.PutStartRequest: lambda: request(
                keys=self.keys(3), object_bytes=4096, timeout_ms=500, request_class=self.request_class()
            ),
            kvstore_pb2.PutEndRequest: lambda: request(put_id=self.random.randrange(50), commit=True),
            kvstore_pb2.ExistsRequest: lambda: request(keys=self.keys(3)),
            kvstore_pb2.RemoveRequest: lambda: request(keys=self.keys(3)),
            kvstore_pb2.AcquireRequest: lambda: request(
                keys=self.keys(3), lease_ms=100, request_id="r", request_class=self.request_class()
            ),
            kvstore_pb2.ReleaseRequest: lambda: request(lease_id=self.random.randrange(50)),
            worker_pb2.GenerateRequest: lambda: request(submission=self.submission()),
            worker_pb2.SessionRequest: lambda: request(submissions=[self.submission()], cancel_stream_ids=[1, 2]),
            worker_pb2.PrefillSessionRequest: self.prefills,
            lb_pb2.GenerateRequest: lambda: request(
                prompt="The jay", sampling=self.sampling(), labels=lb_pb2.RequestLabels(kind="chat", turn=1, user="u")
            ),
        }
        return make[request]() if request in make else request()

    def schedule(self) -> conductor_pb2.ScheduleRequest:
        return conductor_pb2.ScheduleRequest(
            request_id=self.random.randbytes(4).hex(),
            model=self.worker.model,
            prompt_tokens=200,
            block_keys=self.keys(6),
            max_tokens=4,
            exclude_instance_ids=["nobody"],
            request_class=self.request_class(),
        )

    def report(self) -> conductor_pb2.ReportSessionRequest:
        """Returns the report of a new store node; a worker would be given requests."""
        message = conductor_pb2.ReportSessionRequest(
            load=conductor_pb2.InstanceLoad(pending_requests=1, mean_tbt_ms=5.0),
            snapshot=conductor_pb2.CacheSnapshot(seq=1, keys=self.keys(20), first=True, last=True),
            deltas=[conductor_pb2.CacheDelta(seq=2, stored_keys=self.keys(3), removed_keys=self.keys(1))],
            prefills=[conductor_pb2.PrefillMeasurement(computed_tokens=9, compute_us=5, fetched_bytes=5, fetch_us=1)],
            ended_prefill_request_ids=["r"],
            begun_decode_request_ids=["r"],
            begun_prefill_request_ids=["r"],
        )
        message.registration.CopyFrom(
            conductor_pb2.InstanceInfo(
                instance_id=f"hostile-{self.random.randrange(20)}",
                boot_id=self.random.randbytes(4).hex(),
                role=common_pb2.ROLE_STORE,
                address="127.0.0.1:1",
            )
        )
        return message

    def submission(self) -> worker_pb2.Submission:
        message = worker_pb2.Submission(
            stream_id=self.random.randrange(4),
            request_id=self.random.randbytes(4).hex(),
            model=self.worker.model,
            request_class=self.request_class(),
            prompt_tokens_le32=self.tokens(40),
            sampling=self.sampling(),
            placement=self.placement(),
            timeout_ms=5_000,
        )
        if self.random.random() < 0.5:
            message.placement.ClearField("fetches")
        return message

    def prefills(self) -> worker_pb2.PrefillSessionRequest:
        layout = self.worker.layout
        start = worker_pb2.PrefillStart(
            stream_id=self.random.randrange(4),
            request_id=self.random.randbytes(4).hex(),
            prompt_tokens_le32=self.tokens(40),
            sampling=self.sampling(),
            target_offsets_bytes=[0] * -(-40 // layout.block_tokens),
            target_region=self.region(),
            timeout_ms=2_000,
        )
        weights = self.worker.model_fingerprint
        hello = worker_pb2.PrefillHello(
            instance_id="hostile", segment=self.segment(), layout=layout, model_fingerprint=weights
        )
        return worker_pb2.PrefillSessionRequest(hello=hello, starts=[start], cancel_stream_ids=[9])


def payload(target: Target, kept: Kept) -> bytes:
    """Returns one request message, valid, changed or random."""
    random_ = kept.random
    message = kept.valid(target.request)
    how = random_.random()
    if how < 0.25:
        return random_.randbytes(random_.choice((0, 1, 2, 7, 40, 300, 5000)))
    if how < 0.5:
        raw = _damaged(message.SerializeToString(), random_)
        if not parses(target, raw):
            return raw
        message = target.request.FromString(raw)
        return raw if not _restrain(message) else message.SerializeToString()
    for _ in range(random_.randint(1, 3)):
        _change(message, random_)
    _restrain(message)
    return message.SerializeToString()


def parses(target: Target, raw: bytes) -> bool:
    try:
        target.request.FromString(raw)
    except DecodeError:
        return False
    return True


def _damaged(raw: bytes, random_: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(data) + 1)
        what = random_.randrange(4)
        if what == 0 and at < len(data):
            data[at] ^= 1 << random_.randrange(8)
        elif what == 1:
            del data[at : at + random_.randint(1, 9)]
        elif what == 2:
            data[at:at] = random_.randbytes(random_.randint(1, 9))
        else:
            data[at:at] = data[: random_.randint(0, 40)]
    return bytes(data)


_TEXTS = ("", "x", "x" * 129, "x" * 1_500, "\x00", "a\nb", "é" * 65, "127.0.0.1:1", "127.0.0.1:99999", ":::", "../..")
_NUMBERS = (0, 1, 2, 3, 7, 1000, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31))
_FLOATS = (0.0, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))


def _change(message: Message, random_: random.Random) -> None:
    """Changes one field of the message, or of a message within it."""
    fields = [each for each in message.DESCRIPTOR.fields if each.message_type is None or random_.random() < 0.9]
    if not fields:
        return
    field = random_.choice(fields)
    if random_.random() < 0.1:
        message.ClearField(field.name)
        return
    value = getattr(message, field.name)
    if field.is_repeated:
        _change_repeated(value, field, random_)
    elif field.message_type is not None:
        _change(value, random_)
    else:
        setattr(message, field.name, _scalar(field, random_))


def _change_repeated(value: Any, field: FieldDescriptor, random_: random.Random) -> None:
    what = random_.randrange(4)
    if field.message_type is not None:
        if what == 0 and len(value):
            for _ in range(random_.choice((1, 100))):
                value.add().CopyFrom(value[0])
        elif what == 1:
            value.add()
        elif len(value):
            _change(random_.choice(list(value)), random_)
    elif what == 0 and len(value):
        value[random_.randrange(len(value))] = _scalar(field, random_)
    else:
        value.extend(_scalar(field, random_) for _ in range(random_.choice((1, 2, 300))))


def _scalar(field: FieldDescriptor, random_: random.Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return random_.randbytes(random_.choice((0, 1, 15, 16, 17, 160, 4_096)))
        return random_.choice(_TEXTS)
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return random_.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return random_.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return random_.choice((0, 1, 2, 3, 4, 5, 99, -1))
    bits = 64 if kind in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64) else 32
    signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return random_.choice([number for number in _NUMBERS if low <= number <= high])


def _restrain(message: Message) -> bool:
    """Forbids posing as an existing or serving instance, and many tokens; returns whether the message was changed."""
    changed = False
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for each in value if field.is_repeated else (value,):
            if isinstance(each, common_pb2.SamplingParams):
                changed |= each.max_tokens > MAX_TOKENS
                each.max_tokens = min(each.max_tokens, MAX_TOKENS)
            elif isinstance(each, conductor_pb2.InstanceInfo):
                changed |= each.role != common_pb2.ROLE_STORE
                each.role = common_pb2.ROLE_STORE
            else:
                changed |= _restrain(each)
    return changed
