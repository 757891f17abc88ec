from pinyon.api.worker.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("hello", "probe", "requests", "cancel_stream_ids", "proof")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    hello: PeerHello
    probe: int
    requests: _containers.RepeatedCompositeFieldContainer[ForwardedRequest]
    cancel_stream_ids: _containers.RepeatedScalarFieldContainer[int]
    proof: bytes
    def __init__(self, hello: _Optional[_Union[PeerHello, _Mapping]] = ..., probe: _Optional[int] = ..., requests: _Optional[_Iterable[_Union[ForwardedRequest, _Mapping]]] = ..., cancel_stream_ids: _Optional[_Iterable[int]] = ..., proof: _Optional[bytes] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "probe", "state", "updates")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    welcome: PeerWelcome
    probe: int
    state: RegionState
    updates: _containers.RepeatedCompositeFieldContainer[_worker_pb2.StreamUpdate]
    def __init__(self, welcome: _Optional[_Union[PeerWelcome, _Mapping]] = ..., probe: _Optional[int] = ..., state: _Optional[_Union[RegionState, _Mapping]] = ..., updates: _Optional[_Iterable[_Union[_worker_pb2.StreamUpdate, _Mapping]]] = ...) -> None: ...

class PeerHello(_message.Message):
    __slots__ = ("region", "lb_id", "nonce", "version")
    REGION_FIELD_NUMBER: _ClassVar[int]
    LB_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    region: str
    lb_id: str
    nonce: bytes
    version: int
    def __init__(self, region: _Optional[str] = ..., lb_id: _Optional[str] = ..., nonce: _Optional[bytes] = ..., version: _Optional[int] = ...) -> None: ...

class PeerWelcome(_message.Message):
    __slots__ = ("region", "lb_id", "nonce", "proof", "version")
    REGION_FIELD_NUMBER: _ClassVar[int]
    LB_ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    region: str
    lb_id: str
    nonce: bytes
    proof: bytes
    version: int
    def __init__(self, region: _Optional[str] = ..., lb_id: _Optional[str] = ..., nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., version: _Optional[int] = ...) -> None: ...

class ForwardedRequest(_message.Message):
    __slots__ = ("submission", "hops", "gap_ms", "proof")
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    GAP_MS_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    submission: bytes
    hops: int
    gap_ms: int
    proof: bytes
    def __init__(self, submission: _Optional[bytes] = ..., hops: _Optional[int] = ..., gap_ms: _Optional[int] = ..., proof: _Optional[bytes] = ...) -> None: ...

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
