from pinyon.api.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlanPart(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAN_PART_UNSPECIFIED: _ClassVar[PlanPart]
    PLAN_PART_PREFILL: _ClassVar[PlanPart]
    PLAN_PART_DECODE: _ClassVar[PlanPart]
PLAN_PART_UNSPECIFIED: PlanPart
PLAN_PART_PREFILL: PlanPart
PLAN_PART_DECODE: PlanPart

class SessionRequest(_message.Message):
    __slots__ = ("submissions", "cancel_stream_ids", "load_interval_ms")
    SUBMISSIONS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    submissions: _containers.RepeatedCompositeFieldContainer[Submission]
    cancel_stream_ids: _containers.RepeatedScalarFieldContainer[int]
    load_interval_ms: int
    def __init__(self, submissions: _Optional[_Iterable[_Union[Submission, _Mapping]]] = ..., cancel_stream_ids: _Optional[_Iterable[int]] = ..., load_interval_ms: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("updates", "load")
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    updates: _containers.RepeatedCompositeFieldContainer[StreamUpdate]
    load: Load
    def __init__(self, updates: _Optional[_Iterable[_Union[StreamUpdate, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("seq", "pending", "running", "room", "max_batch", "pending_prefill_tokens", "draining", "received")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    PENDING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    pending: int
    running: int
    room: int
    max_batch: int
    pending_prefill_tokens: int
    draining: bool
    received: int
    def __init__(self, seq: _Optional[int] = ..., pending: _Optional[int] = ..., running: _Optional[int] = ..., room: _Optional[int] = ..., max_batch: _Optional[int] = ..., pending_prefill_tokens: _Optional[int] = ..., draining: _Optional[bool] = ..., received: _Optional[int] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("stream_id", "request_id", "model", "request_class", "prompt_tokens_le32", "block_keys", "sampling", "generated_tokens", "placement", "timeout_ms", "traceparent", "no_reuse", "model_fingerprint", "ttft_left_ms")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_LE32_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    NO_REUSE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TTFT_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    request_id: str
    model: str
    request_class: _common_pb2.RequestClass
    prompt_tokens_le32: bytes
    block_keys: bytes
    sampling: _common_pb2.SamplingParams
    generated_tokens: int
    placement: _common_pb2.Placement
    timeout_ms: int
    traceparent: str
    no_reuse: bool
    model_fingerprint: str
    ttft_left_ms: int
    def __init__(self, stream_id: _Optional[int] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., request_class: _Optional[_Union[_common_pb2.RequestClass, _Mapping]] = ..., prompt_tokens_le32: _Optional[bytes] = ..., block_keys: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., generated_tokens: _Optional[int] = ..., placement: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., no_reuse: _Optional[bool] = ..., model_fingerprint: _Optional[str] = ..., ttft_left_ms: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("request_id", "request_class", "placement", "no_reuse", "traceparent", "prefill_ms", "part")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    NO_REUSE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    request_class: _common_pb2.RequestClass
    placement: _common_pb2.Placement
    no_reuse: bool
    traceparent: str
    prefill_ms: int
    part: PlanPart
    def __init__(self, request_id: _Optional[str] = ..., request_class: _Optional[_Union[_common_pb2.RequestClass, _Mapping]] = ..., placement: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ..., no_reuse: _Optional[bool] = ..., traceparent: _Optional[str] = ..., prefill_ms: _Optional[int] = ..., part: _Optional[_Union[PlanPart, str]] = ...) -> None: ...

class StreamUpdate(_message.Message):
    __slots__ = ("stream_id", "tokens", "text", "finish_reason", "usage", "error", "prefill", "logprobs", "prompt_logprobs", "model_fingerprint")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    text: str
    finish_reason: _common_pb2.FinishReason
    usage: _common_pb2.Usage
    error: _common_pb2.Error
    prefill: PrefillReport
    logprobs: _common_pb2.Logprobs
    prompt_logprobs: _common_pb2.Logprobs
    model_fingerprint: str
    def __init__(self, stream_id: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., prefill: _Optional[_Union[PrefillReport, _Mapping]] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class PrefillReport(_message.Message):
    __slots__ = ("prefill_instance_id", "queue_ms", "fetch_ms", "compute_ms", "push_ms", "computed_tokens", "local_tokens", "peer_tokens", "store_tokens", "decode_local_tokens")
    PREFILL_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    FETCH_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    PUSH_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefill_instance_id: str
    queue_ms: float
    fetch_ms: float
    compute_ms: float
    push_ms: float
    computed_tokens: int
    local_tokens: int
    peer_tokens: int
    store_tokens: int
    decode_local_tokens: int
    def __init__(self, prefill_instance_id: _Optional[str] = ..., queue_ms: _Optional[float] = ..., fetch_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., push_ms: _Optional[float] = ..., computed_tokens: _Optional[int] = ..., local_tokens: _Optional[int] = ..., peer_tokens: _Optional[int] = ..., store_tokens: _Optional[int] = ..., decode_local_tokens: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("submission",)
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    submission: Submission
    def __init__(self, submission: _Optional[_Union[Submission, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("update",)
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    update: StreamUpdate
    def __init__(self, update: _Optional[_Union[StreamUpdate, _Mapping]] = ...) -> None: ...

class PrefillSessionRequest(_message.Message):
    __slots__ = ("hello", "starts", "cancel_stream_ids")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    CANCEL_STREAM_IDS_FIELD_NUMBER: _ClassVar[int]
    hello: PrefillHello
    starts: _containers.RepeatedCompositeFieldContainer[PrefillStart]
    cancel_stream_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hello: _Optional[_Union[PrefillHello, _Mapping]] = ..., starts: _Optional[_Iterable[_Union[PrefillStart, _Mapping]]] = ..., cancel_stream_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillHello(_message.Message):
    __slots__ = ("instance_id", "segment", "layout", "model_fingerprint")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    segment: _common_pb2.Segment
    layout: _common_pb2.KvLayout
    model_fingerprint: str
    def __init__(self, instance_id: _Optional[str] = ..., segment: _Optional[_Union[_common_pb2.Segment, _Mapping]] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class PrefillStart(_message.Message):
    __slots__ = ("stream_id", "request_id", "request_class", "prompt_tokens_le32", "block_keys", "sampling", "generated_tokens", "fetches", "target_offsets_bytes", "first_target_block", "timeout_ms", "traceparent", "no_reuse", "target_region", "ttft_left_ms", "predicted_prefill_ms", "ask_store")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_LE32_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    TARGET_OFFSETS_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TARGET_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    NO_REUSE_FIELD_NUMBER: _ClassVar[int]
    TARGET_REGION_FIELD_NUMBER: _ClassVar[int]
    TTFT_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    ASK_STORE_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    request_id: str
    request_class: _common_pb2.RequestClass
    prompt_tokens_le32: bytes
    block_keys: bytes
    sampling: _common_pb2.SamplingParams
    generated_tokens: int
    fetches: _containers.RepeatedCompositeFieldContainer[_common_pb2.FetchSpan]
    target_offsets_bytes: _containers.RepeatedScalarFieldContainer[int]
    first_target_block: int
    timeout_ms: int
    traceparent: str
    no_reuse: bool
    target_region: _common_pb2.Region
    ttft_left_ms: int
    predicted_prefill_ms: float
    ask_store: bool
    def __init__(self, stream_id: _Optional[int] = ..., request_id: _Optional[str] = ..., request_class: _Optional[_Union[_common_pb2.RequestClass, _Mapping]] = ..., prompt_tokens_le32: _Optional[bytes] = ..., block_keys: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., generated_tokens: _Optional[int] = ..., fetches: _Optional[_Iterable[_Union[_common_pb2.FetchSpan, _Mapping]]] = ..., target_offsets_bytes: _Optional[_Iterable[int]] = ..., first_target_block: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., no_reuse: _Optional[bool] = ..., target_region: _Optional[_Union[_common_pb2.Region, _Mapping]] = ..., ttft_left_ms: _Optional[int] = ..., predicted_prefill_ms: _Optional[float] = ..., ask_store: _Optional[bool] = ...) -> None: ...

class PrefillSessionResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[PrefillResult]
    def __init__(self, results: _Optional[_Iterable[_Union[PrefillResult, _Mapping]]] = ...) -> None: ...

class PrefillResult(_message.Message):
    __slots__ = ("stream_id", "first_token", "report", "error", "logprobs", "prompt_logprobs")
    STREAM_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    stream_id: int
    first_token: int
    report: PrefillReport
    error: _common_pb2.Error
    logprobs: _common_pb2.Logprobs
    prompt_logprobs: _common_pb2.Logprobs
    def __init__(self, stream_id: _Optional[int] = ..., first_token: _Optional[int] = ..., report: _Optional[_Union[PrefillReport, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("instance_id", "role", "model", "pending_requests", "running_requests", "used_blocks", "cached_blocks", "total_blocks", "leases", "draining")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PENDING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    role: _common_pb2.Role
    model: str
    pending_requests: int
    running_requests: int
    used_blocks: int
    cached_blocks: int
    total_blocks: int
    leases: int
    draining: bool
    def __init__(self, instance_id: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., model: _Optional[str] = ..., pending_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., used_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., leases: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...
