from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListObjectsRequest(_message.Message):
    __slots__ = ("limit", "largest", "page_token", "tenant", "keys")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    limit: int
    largest: bool
    page_token: bytes
    tenant: str
    keys: bytes
    def __init__(self, limit: _Optional[int] = ..., largest: _Optional[bool] = ..., page_token: _Optional[bytes] = ..., tenant: _Optional[str] = ..., keys: _Optional[bytes] = ...) -> None: ...

class ListObjectsResponse(_message.Message):
    __slots__ = ("objects", "next_page_token", "total_objects", "total_bytes")
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    objects: _containers.RepeatedCompositeFieldContainer[StoredObject]
    next_page_token: bytes
    total_objects: int
    total_bytes: int
    def __init__(self, objects: _Optional[_Iterable[_Union[StoredObject, _Mapping]]] = ..., next_page_token: _Optional[bytes] = ..., total_objects: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class StoredObject(_message.Message):
    __slots__ = ("key", "size_bytes", "on_disk", "tenant", "category", "leases", "pinned", "idle_ms")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ON_DISK_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CATEGORY_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    size_bytes: int
    on_disk: bool
    tenant: str
    category: str
    leases: int
    pinned: bool
    idle_ms: int
    def __init__(self, key: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., on_disk: _Optional[bool] = ..., tenant: _Optional[str] = ..., category: _Optional[str] = ..., leases: _Optional[int] = ..., pinned: _Optional[bool] = ..., idle_ms: _Optional[int] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatResponse(_message.Message):
    __slots__ = ("node_id", "boot_id", "draining", "capacity_bytes", "used_bytes", "objects", "pinned_objects", "pinned_bytes", "pinned_max_bytes", "leases", "open_puts", "hits", "misses", "evicted", "refused", "disk_capacity_bytes", "disk_used_bytes", "disk_objects", "disk_unsaved", "disk_failures")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    PINNED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    OPEN_PUTS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DISK_CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    DISK_UNSAVED_FIELD_NUMBER: _ClassVar[int]
    DISK_FAILURES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    boot_id: str
    draining: bool
    capacity_bytes: int
    used_bytes: int
    objects: int
    pinned_objects: int
    pinned_bytes: int
    pinned_max_bytes: int
    leases: int
    open_puts: int
    hits: int
    misses: int
    evicted: int
    refused: int
    disk_capacity_bytes: int
    disk_used_bytes: int
    disk_objects: int
    disk_unsaved: int
    disk_failures: int
    def __init__(self, node_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., draining: _Optional[bool] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., objects: _Optional[int] = ..., pinned_objects: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., pinned_max_bytes: _Optional[int] = ..., leases: _Optional[int] = ..., open_puts: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., evicted: _Optional[int] = ..., refused: _Optional[int] = ..., disk_capacity_bytes: _Optional[int] = ..., disk_used_bytes: _Optional[int] = ..., disk_objects: _Optional[int] = ..., disk_unsaved: _Optional[int] = ..., disk_failures: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("keys", "duration_ms")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    duration_ms: int
    def __init__(self, keys: _Optional[bytes] = ..., duration_ms: _Optional[int] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pinned",)
    PINNED_FIELD_NUMBER: _ClassVar[int]
    pinned: bytes
    def __init__(self, pinned: _Optional[bytes] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("unpinned",)
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    unpinned: bytes
    def __init__(self, unpinned: _Optional[bytes] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("keys", "tenant", "every")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    tenant: str
    every: bool
    def __init__(self, keys: _Optional[bytes] = ..., tenant: _Optional[str] = ..., every: _Optional[bool] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("evicted", "evicted_bytes", "still_read", "kept")
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STILL_READ_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    evicted: int
    evicted_bytes: int
    still_read: int
    kept: int
    def __init__(self, evicted: _Optional[int] = ..., evicted_bytes: _Optional[int] = ..., still_read: _Optional[int] = ..., kept: _Optional[int] = ...) -> None: ...
