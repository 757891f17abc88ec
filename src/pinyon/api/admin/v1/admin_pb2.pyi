from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ApplyRequest(_message.Message):
    __slots__ = ("settings",)
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    def __init__(self, settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ...) -> None: ...

class Setting(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class ApplyResponse(_message.Message):
    __slots__ = ("changes",)
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    def __init__(self, changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("name", "before", "after")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    name: str
    before: str
    after: str
    def __init__(self, name: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("salt",)
    SALT_FIELD_NUMBER: _ClassVar[int]
    salt: bytes
    def __init__(self, salt: _Optional[bytes] = ...) -> None: ...

class RecordResponse(_message.Message):
    __slots__ = ("requests", "dropped")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RecordedRequest]
    dropped: int
    def __init__(self, requests: _Optional[_Iterable[_Union[RecordedRequest, _Mapping]]] = ..., dropped: _Optional[int] = ...) -> None: ...

class RecordedRequest(_message.Message):
    __slots__ = ("arrived_unix_s", "kind", "turn", "user", "session", "prompt_tokens", "generated_tokens", "blocks")
    ARRIVED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    arrived_unix_s: float
    kind: str
    turn: int
    user: bytes
    session: bytes
    prompt_tokens: int
    generated_tokens: int
    blocks: bytes
    def __init__(self, arrived_unix_s: _Optional[float] = ..., kind: _Optional[str] = ..., turn: _Optional[int] = ..., user: _Optional[bytes] = ..., session: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., blocks: _Optional[bytes] = ...) -> None: ...
