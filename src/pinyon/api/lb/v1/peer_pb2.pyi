from pinyon.api.common.v1 import common_pb2 as _common_pb2
from pinyon.api.worker.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PeerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PEER_KIND_UNSPECIFIED: _ClassVar[PeerKind]
    PEER_KIND_UPSTREAM: _ClassVar[PeerKind]
PEER_KIND_UNSPECIFIED: PeerKind
PEER_KIND_UPSTREAM: PeerKind

class SessionRequest(_message.Message):
    __slots__ = ("hello", "probe", "requests", "cancel_stream_ids", "raw_requests", "raw_bodies", "raw_taken")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    RAW_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RAW_BODIES_FIELD_NUMBER: _ClassVar[int]
    RAW_TAKEN_FIELD_NUMBER: _ClassVar[int]
    hello: PeerHello
    probe: int
    requests: _containers.RepeatedCompositeFieldContainer[ForwardedRequest]
    cancel_stream_ids: _containers.RepeatedScalarFieldContainer[int]
    raw_requests: _containers.RepeatedCompositeFieldContainer[RawRequest]
    raw_bodies: _containers.RepeatedCompositeFieldContainer[RawBody]
    raw_taken: _containers.RepeatedCompositeFieldContainer[RawTaken]
    def __init__(self, hello: _Optional[_Union[PeerHello, _Mapping]] = ..., probe: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[ForwardedRequest, _Mapping]]] = ..., cancel_stream_ids: _Optional[_Iterable[int]] = ..., raw_requests: _Optional[_Iterable[_Union[RawRequest, _Mapping]]] = ..., raw_bodies: _Optional[_Iterable[_Union[RawBody, _Mapping]]] = ..., raw_taken: _Optional[_Iterable[_Union[RawTaken, _Mapping]]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "probe", "state", "updates", "raw_pieces")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    RAW_PIECES_FIELD_NUMBER: _ClassVar[int]
    welcome: PeerWelcome
    probe: int
    state: RegionState
    updates: _containers.RepeatedCompositeFieldContainer[_worker_pb2.StreamUpdate]
    raw_pieces: _containers.RepeatedCompositeFieldContainer[RawPiece]
    def __init__(self, welcome: _Optional[_Union[PeerWelcome, _Mapping]] = ..., probe: _Optional[int] = ..., state: _Optional[_Union[RegionState, _Mapping]] = ..., updates: _Optional[_Iterable[_Union[_worker_pb2.StreamUpdate, _Mapping]]] = ..., raw_pieces: _Optional[_Iterable[_Union[RawPiece, _Mapping]]] = ...) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("region", "lb_id", "version", "kind")
    REGION_FIELD_NUMBER: _ClassVar[int]
    LB_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    region: str
    lb_id: str
    version: int
    kind: PeerKind
    def __init__(self, region: _Optional[str] = ..., lb_id: _Optional[str] = ..., version: _Optional[int] = ..., kind: _Optional[_Union[PeerKind, str]] = ...) -> None: ...

class PeerWelcome(_message.Message):
    __slots__ = ("region", "lb_id", "version", "kind")
    REGION_FIELD_NUMBER: _ClassVar[int]
    LB_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    region: str
    lb_id: str
    version: int
    kind: PeerKind
    def __init__(self, region: _Optional[str] = ..., lb_id: _Optional[str] = ..., version: _Optional[int] = ..., kind: _Optional[_Union[PeerKind, str]] = ...) -> None: ...

class ForwardedRequest(_message.Message):
    __slots__ = ("submission", "hops", "gap_ms")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    GAP_MS_FIELD_NUMBER: _ClassVar[int]
    submission: bytes
    hops: int
    gap_ms: int
    def __init__(self, submission: _Optional[bytes] = ..., hops: _Optional[int] = ..., gap_ms: _Optional[int] = ...) -> None: ...

class RawRequest(_message.Message):
    __slots__ = ("head", "hops", "body")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    head: bytes
    hops: int
    body: bytes
    def __init__(self, head: _Optional[bytes] = ..., hops: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...

class RawHead(_message.Message):
    __slots__ = ("stream_id", "request_id", "target", "fields", "body_length", "model", "request_class", "timeout_ms")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    BODY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    request_id: str
    target: bytes
    fields: bytes
    body_length: int
    model: str
    request_class: _common_pb2.RequestClass
    timeout_ms: int
    def __init__(self, stream_id: _Optional[int] = ..., request_id: _Optional[str] = ..., target: _Optional[bytes] = ..., fields: _Optional[bytes] = ..., body_length: _Optional[int] = ..., model: _Optional[str] = ..., request_class: _Optional[_Union[_common_pb2.RequestClass, _Mapping]] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class RawBody(_message.Message):
    __slots__ = ("stream_id", "data")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    data: bytes
    def __init__(self, stream_id: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class RawTaken(_message.Message):
    __slots__ = ("stream_id", "bytes")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    bytes: int
    def __init__(self, stream_id: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class RawPiece(_message.Message):
    __slots__ = ("stream_id", "answer", "data", "end", "error")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    answer: RawAnswer
    data: bytes
    end: bool
    error: _common_pb2.Error
    def __init__(self, stream_id: _Optional[int] = ..., answer: _Optional[_Union[RawAnswer, _Mapping]] = ..., data: _Optional[bytes] = ..., end: _Optional[bool] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class RawAnswer(_message.Message):
    __slots__ = ("status", "fields", "length")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    status: int
    fields: bytes
    length: int
    def __init__(self, status: _Optional[int] = ..., fields: _Optional[bytes] = ..., length: _Optional[int] = ...) -> None: ...

class RegionState(_message.Message):
    __slots__ = ("version", "models", "draining", "received")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    version: int
    models: _containers.RepeatedCompositeFieldContainer[ModelState]
    draining: bool
    received: int
    def __init__(self, version: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelState, _Mapping]]] = ..., draining: _Optional[bool] = ..., received: _Optional[int] = ...) -> None: ...

class ModelState(_message.Message):
    __slots__ = ("model", "instances", "available_instances", "queued", "credits", "running")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    model: str
    instances: int
    available_instances: int
    queued: int
    credits: int
    running: int
    def __init__(self, model: _Optional[str] = ..., instances: _Optional[int] = ..., available_instances: _Optional[int] = ..., queued: _Optional[int] = ..., credits: _Optional[int] = ..., running: _Optional[int] = ...) -> None: ...
