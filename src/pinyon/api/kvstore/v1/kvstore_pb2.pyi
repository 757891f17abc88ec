from pinyon.api.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PutSlotState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUT_SLOT_STATE_UNSPECIFIED: _ClassVar[PutSlotState]
    PUT_SLOT_STATE_RESERVED: _ClassVar[PutSlotState]
    PUT_SLOT_STATE_EXISTS: _ClassVar[PutSlotState]
    PUT_SLOT_STATE_NO_SPACE: _ClassVar[PutSlotState]
    PUT_SLOT_STATE_BEING_PUT: _ClassVar[PutSlotState]
PUT_SLOT_STATE_UNSPECIFIED: PutSlotState
PUT_SLOT_STATE_RESERVED: PutSlotState
PUT_SLOT_STATE_EXISTS: PutSlotState
PUT_SLOT_STATE_NO_SPACE: PutSlotState
PUT_SLOT_STATE_BEING_PUT: PutSlotState

class PutStartRequest(_message.Message):
    __slots__ = ("keys", "object_bytes", "timeout_ms", "request_class", "places", "copies")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    OBJECT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    object_bytes: int
    timeout_ms: int
    request_class: _common_pb2.RequestClass
    places: _containers.RepeatedScalarFieldContainer[int]
    copies: bool
    def __init__(self, keys: _Optional[bytes] = ..., object_bytes: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., request_class: _Optional[_Union[_common_pb2.RequestClass, _Mapping]] = ..., places: _Optional[_Iterable[int]] = ..., copies: _Optional[bool] = ...) -> None: ...

class PutSlot(_message.Message):
    __slots__ = ("state", "offset_bytes")
    STATE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    state: PutSlotState
    offset_bytes: int
    def __init__(self, state: _Optional[_Union[PutSlotState, str]] = ..., offset_bytes: _Optional[int] = ...) -> None: ...

class PutStartResponse(_message.Message):
    __slots__ = ("put_id", "slots", "segment", "no_space")
    PUT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    NO_SPACE_FIELD_NUMBER: _ClassVar[int]
    put_id: int
    slots: _containers.RepeatedCompositeFieldContainer[PutSlot]
    segment: _common_pb2.Segment
    no_space: str
    def __init__(self, put_id: _Optional[int] = ..., slots: _Optional[_Iterable[_Union[PutSlot, _Mapping]]] = ..., segment: _Optional[_Union[_common_pb2.Segment, _Mapping]] = ..., no_space: _Optional[str] = ...) -> None: ...

class PutEndRequest(_message.Message):
    __slots__ = ("put_id", "commit", "checksums", "parts")
    PUT_ID_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    put_id: int
    commit: bool
    checksums: bytes
    parts: int
    def __init__(self, put_id: _Optional[int] = ..., commit: _Optional[bool] = ..., checksums: _Optional[bytes] = ..., parts: _Optional[int] = ...) -> None: ...

class PutEndResponse(_message.Message):
    __slots__ = ("committed",)
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    committed: int
    def __init__(self, committed: _Optional[int] = ...) -> None: ...

class ExistsRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class ExistsResponse(_message.Message):
    __slots__ = ("exists",)
    EXISTS_FIELD_NUMBER: _ClassVar[int]
    exists: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, exists: _Optional[_Iterable[bool]] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class RemoveResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: int
    def __init__(self, removed: _Optional[int] = ...) -> None: ...

class ReplicateRequest(_message.Message):
    __slots__ = ("keys", "target", "timeout_ms")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    target: str
    timeout_ms: int
    def __init__(self, keys: _Optional[bytes] = ..., target: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class ReplicateResponse(_message.Message):
    __slots__ = ("copied",)
    COPIED_FIELD_NUMBER: _ClassVar[int]
    copied: int
    def __init__(self, copied: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("copied", "copied_bytes", "seen", "objects", "lost")
    COPIED_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    copied: int
    copied_bytes: int
    seen: int
    objects: int
    lost: int
    def __init__(self, copied: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., seen: _Optional[int] = ..., objects: _Optional[int] = ..., lost: _Optional[int] = ...) -> None: ...

class GetNodeStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetNodeStatusResponse(_message.Message):
    __slots__ = ("node_id", "boot_id", "capacity_bytes", "used_bytes", "objects", "leases", "open_puts")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    OPEN_PUTS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    boot_id: str
    capacity_bytes: int
    used_bytes: int
    objects: int
    leases: int
    open_puts: int
    def __init__(self, node_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., objects: _Optional[int] = ..., leases: _Optional[int] = ..., open_puts: _Optional[int] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("keys", "lease_ms", "request_id", "traceparent", "allow_gaps", "request_class", "first_block")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ALLOW_GAPS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    lease_ms: int
    request_id: str
    traceparent: str
    allow_gaps: bool
    request_class: _common_pb2.RequestClass
    first_block: int
    def __init__(self, keys: _Optional[bytes] = ..., lease_ms: _Optional[int] = ..., request_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., allow_gaps: _Optional[bool] = ..., request_class: _Optional[_Union[_common_pb2.RequestClass, _Mapping]] = ..., first_block: _Optional[int] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("lease_id", "lease_ms", "segment", "blocks", "layers")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    lease_ms: int
    segment: _common_pb2.Segment
    blocks: _containers.RepeatedCompositeFieldContainer[BlockLocation]
    layers: _containers.RepeatedCompositeFieldContainer[LayerPlace]
    def __init__(self, lease_id: _Optional[int] = ..., lease_ms: _Optional[int] = ..., segment: _Optional[_Union[_common_pb2.Segment, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockLocation, _Mapping]]] = ..., layers: _Optional[_Iterable[_Union[LayerPlace, _Mapping]]] = ...) -> None: ...

class LayerPlace(_message.Message):
    __slots__ = ("region", "base_bytes", "stride_bytes", "length_bytes")
    REGION_FIELD_NUMBER: _ClassVar[int]
    BASE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    region: int
    base_bytes: int
    stride_bytes: int
    length_bytes: int
    def __init__(self, region: _Optional[int] = ..., base_bytes: _Optional[int] = ..., stride_bytes: _Optional[int] = ..., length_bytes: _Optional[int] = ...) -> None: ...

class BlockLocation(_message.Message):
    __slots__ = ("index", "offset_bytes", "length_bytes", "checksums")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    index: int
    offset_bytes: int
    length_bytes: int
    checksums: bytes
    def __init__(self, index: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., length_bytes: _Optional[int] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_id", "lease_ms")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    lease_ms: int
    def __init__(self, lease_id: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("lease_ms",)
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    def __init__(self, lease_ms: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id", "corrupt")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    corrupt: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_id: _Optional[int] = ..., corrupt: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...
