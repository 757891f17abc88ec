from pinyon.api.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("model", "prompt", "prompt_tokens_le32", "conversation", "sampling", "no_reuse", "ttft_slo_ms", "labels", "add_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_LE32_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NO_REUSE_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    prompt: str
    prompt_tokens_le32: bytes
    conversation: Conversation
    sampling: _common_pb2.SamplingParams
    no_reuse: bool
    ttft_slo_ms: int
    labels: RequestLabels
    add_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., prompt: _Optional[str] = ..., prompt_tokens_le32: _Optional[bytes] = ..., conversation: _Optional[_Union[Conversation, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., no_reuse: _Optional[bool] = ..., ttft_slo_ms: _Optional[int] = ..., labels: _Optional[_Union[RequestLabels, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class RequestLabels(_message.Message):
    __slots__ = ("kind", "turn", "session", "user", "priority", "geographies", "cache_salt", "no_store")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    GEOGRAPHIES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    NO_STORE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    turn: int
    session: str
    user: str
    priority: int
    geographies: _containers.RepeatedScalarFieldContainer[str]
    cache_salt: str
    no_store: bool
    def __init__(self, kind: _Optional[str] = ..., turn: _Optional[int] = ..., session: _Optional[str] = ..., user: _Optional[str] = ..., priority: _Optional[int] = ..., geographies: _Optional[_Iterable[str]] = ..., cache_salt: _Optional[str] = ..., no_store: _Optional[bool] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "text", "tokens", "finish_reason", "usage", "logprobs", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    logprobs: _common_pb2.Logprobs
    prompt_logprobs: _common_pb2.Logprobs
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class WhereToRequest(_message.Message):
    __slots__ = ("model", "geographies")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GEOGRAPHIES_FIELD_NUMBER: _ClassVar[int]
    model: str
    geographies: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., geographies: _Optional[_Iterable[str]] = ...) -> None: ...

class WhereToResponse(_message.Message):
    __slots__ = ("ways",)
    WAYS_FIELD_NUMBER: _ClassVar[int]
    ways: _containers.RepeatedCompositeFieldContainer[Way]
    def __init__(self, ways: _Optional[_Iterable[_Union[Way, _Mapping]]] = ...) -> None: ...

class Way(_message.Message):
    __slots__ = ("region", "lb_id", "allowed", "available", "reason")
    REGION_FIELD_NUMBER: _ClassVar[int]
    LB_ID_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    region: str
    lb_id: str
    allowed: bool
    available: bool
    reason: str
    def __init__(self, region: _Optional[str] = ..., lb_id: _Optional[str] = ..., allowed: _Optional[bool] = ..., available: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "max_context_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_context_tokens: int
    def __init__(self, name: _Optional[str] = ..., max_context_tokens: _Optional[int] = ...) -> None: ...
