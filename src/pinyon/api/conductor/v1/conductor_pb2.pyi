from pinyon.api.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScheduleRequest(_message.Message):
    __slots__ = ("request_id", "model", "request_class", "prompt_tokens", "block_keys", "max_tokens", "ttft_slo_ms", "tbt_slo_ms", "exclude_instance_ids", "no_reuse", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    NO_REUSE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    request_class: _common_pb2.RequestClass
    prompt_tokens: int
    block_keys: bytes
    max_tokens: int
    ttft_slo_ms: int
    tbt_slo_ms: int
    exclude_instance_ids: _containers.RepeatedScalarFieldContainer[str]
    no_reuse: bool
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., request_class: _Optional[_Union[_common_pb2.RequestClass, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., block_keys: _Optional[bytes] = ..., max_tokens: _Optional[int] = ..., ttft_slo_ms: _Optional[int] = ..., tbt_slo_ms: _Optional[int] = ..., exclude_instance_ids: _Optional[_Iterable[str]] = ..., no_reuse: _Optional[bool] = ..., traceparent: _Optional[str] = ...) -> None: ...

class ScheduleResponse(_message.Message):
    __slots__ = ("request_id", "placement", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    placement: _common_pb2.Placement
    error: _common_pb2.Error
    def __init__(self, request_id: _Optional[str] = ..., placement: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class ScheduleSessionRequest(_message.Message):
    __slots__ = ("requests", "released_request_ids", "lb_id")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    LB_ID_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[ScheduleRequest]
    released_request_ids: _containers.RepeatedScalarFieldContainer[str]
    lb_id: str
    def __init__(self, requests: _Optional[_Iterable[_Union[ScheduleRequest, _Mapping]]] = ..., released_request_ids: _Optional[_Iterable[str]] = ..., lb_id: _Optional[str] = ...) -> None: ...

class ScheduleSessionResponse(_message.Message):
    __slots__ = ("responses", "instances")
    RESPONSES_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    responses: _containers.RepeatedCompositeFieldContainer[ScheduleResponse]
    instances: InstanceList
    def __init__(self, responses: _Optional[_Iterable[_Union[ScheduleResponse, _Mapping]]] = ..., instances: _Optional[_Union[InstanceList, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class InstanceList(_message.Message):
    __slots__ = ("version", "instances", "incomplete")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    version: int
    instances: _containers.RepeatedCompositeFieldContainer[Instance]
    incomplete: bool
    def __init__(self, version: _Optional[int] = ..., instances: _Optional[_Iterable[_Union[Instance, _Mapping]]] = ..., incomplete: _Optional[bool] = ...) -> None: ...

class Instance(_message.Message):
    __slots__ = ("info", "load", "indexed_blocks", "report_age_ms", "schedulable")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    INDEXED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULABLE_FIELD_NUMBER: _ClassVar[int]
    info: InstanceInfo
    load: InstanceLoad
    indexed_blocks: int
    report_age_ms: int
    schedulable: bool
    def __init__(self, info: _Optional[_Union[InstanceInfo, _Mapping]] = ..., load: _Optional[_Union[InstanceLoad, _Mapping]] = ..., indexed_blocks: _Optional[int] = ..., report_age_ms: _Optional[int] = ..., schedulable: _Optional[bool] = ...) -> None: ...

class InstanceInfo(_message.Message):
    __slots__ = ("instance_id", "boot_id", "role", "address", "model", "model_fingerprint", "layout", "capacity_blocks", "max_batch", "max_context_tokens", "key_secret_id", "short_first", "server_url", "keeps_to_itself", "zone")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEY_SECRET_ID_FIELD_NUMBER: _ClassVar[int]
    SHORT_FIRST_FIELD_NUMBER: _ClassVar[int]
    SERVER_URL_FIELD_NUMBER: _ClassVar[int]
    KEEPS_TO_ITSELF_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    boot_id: str
    role: _common_pb2.Role
    address: str
    model: str
    model_fingerprint: str
    layout: _common_pb2.KvLayout
    capacity_blocks: int
    max_batch: int
    max_context_tokens: int
    key_secret_id: str
    short_first: bool
    server_url: str
    keeps_to_itself: bool
    zone: str
    def __init__(self, instance_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ..., capacity_blocks: _Optional[int] = ..., max_batch: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., key_secret_id: _Optional[str] = ..., short_first: _Optional[bool] = ..., server_url: _Optional[str] = ..., keeps_to_itself: _Optional[bool] = ..., zone: _Optional[str] = ...) -> None: ...

class InstanceLoad(_message.Message):
    __slots__ = ("pending_requests", "running_requests", "pending_prefill_tokens", "used_blocks", "cached_blocks", "mean_tbt_ms", "draining", "failed_source_addresses", "room_wait_ms", "mean_batch", "mean_kv_tokens", "kv_tokens", "prefix_level_blocks", "shared_prefixes", "waiting_for_room", "room")
    PENDING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PENDING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MEAN_TBT_MS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    FAILED_SOURCE_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ROOM_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    MEAN_BATCH_FIELD_NUMBER: _ClassVar[int]
    MEAN_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LEVEL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_ROOM_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    pending_requests: int
    running_requests: int
    pending_prefill_tokens: int
    used_blocks: int
    cached_blocks: int
    mean_tbt_ms: float
    draining: bool
    failed_source_addresses: _containers.RepeatedScalarFieldContainer[str]
    room_wait_ms: float
    mean_batch: float
    mean_kv_tokens: float
    kv_tokens: int
    prefix_level_blocks: int
    shared_prefixes: _containers.RepeatedCompositeFieldContainer[SharedPrefix]
    waiting_for_room: int
    room: int
    def __init__(self, pending_requests: _Optional[int] = ..., running_requests: _Optional[int] = ..., pending_prefill_tokens: _Optional[int] = ..., used_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., mean_tbt_ms: _Optional[float] = ..., draining: _Optional[bool] = ..., failed_source_addresses: _Optional[_Iterable[str]] = ..., room_wait_ms: _Optional[float] = ..., mean_batch: _Optional[float] = ..., mean_kv_tokens: _Optional[float] = ..., kv_tokens: _Optional[int] = ..., prefix_level_blocks: _Optional[int] = ..., shared_prefixes: _Optional[_Iterable[_Union[SharedPrefix, _Mapping]]] = ..., waiting_for_room: _Optional[int] = ..., room: _Optional[int] = ...) -> None: ...

class SharedPrefix(_message.Message):
    __slots__ = ("block_key", "blocks", "requests")
    BLOCK_KEY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    block_key: bytes
    blocks: int
    requests: int
    def __init__(self, block_key: _Optional[bytes] = ..., blocks: _Optional[int] = ..., requests: _Optional[int] = ...) -> None: ...

class LookupBlocksRequest(_message.Message):
    __slots__ = ("block_keys",)
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    block_keys: bytes
    def __init__(self, block_keys: _Optional[bytes] = ...) -> None: ...

class LookupBlocksResponse(_message.Message):
    __slots__ = ("holders",)
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[BlockHolder]
    def __init__(self, holders: _Optional[_Iterable[_Union[BlockHolder, _Mapping]]] = ...) -> None: ...

class BlockHolder(_message.Message):
    __slots__ = ("instance_id", "prefix_blocks")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    prefix_blocks: int
    def __init__(self, instance_id: _Optional[str] = ..., prefix_blocks: _Optional[int] = ...) -> None: ...

class ReportSessionRequest(_message.Message):
    __slots__ = ("registration", "snapshot", "deltas", "load", "prefills", "ended_prefill_request_ids", "ended_decode_request_ids", "leaving", "begun_decode_request_ids", "begun_prefill_request_ids", "first_tokens", "reads")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FIELD_NUMBER: _ClassVar[int]
    ENDED_PREFILL_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_DECODE_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    BEGUN_DECODE_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_PREFILL_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    registration: InstanceInfo
    snapshot: CacheSnapshot
    deltas: _containers.RepeatedCompositeFieldContainer[CacheDelta]
    load: InstanceLoad
    prefills: _containers.RepeatedCompositeFieldContainer[PrefillMeasurement]
    ended_prefill_request_ids: _containers.RepeatedScalarFieldContainer[str]
    ended_decode_request_ids: _containers.RepeatedScalarFieldContainer[str]
    leaving: bool
    begun_decode_request_ids: _containers.RepeatedScalarFieldContainer[str]
    begun_prefill_request_ids: _containers.RepeatedScalarFieldContainer[str]
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstTokenMeasurement]
    reads: WindowReads
    def __init__(self, registration: _Optional[_Union[InstanceInfo, _Mapping]] = ..., snapshot: _Optional[_Union[CacheSnapshot, _Mapping]] = ..., deltas: _Optional[_Iterable[_Union[CacheDelta, _Mapping]]] = ..., load: _Optional[_Union[InstanceLoad, _Mapping]] = ..., prefills: _Optional[_Iterable[_Union[PrefillMeasurement, _Mapping]]] = ..., ended_prefill_request_ids: _Optional[_Iterable[str]] = ..., ended_decode_request_ids: _Optional[_Iterable[str]] = ..., leaving: _Optional[bool] = ..., begun_decode_request_ids: _Optional[_Iterable[str]] = ..., begun_prefill_request_ids: _Optional[_Iterable[str]] = ..., first_tokens: _Optional[_Iterable[_Union[FirstTokenMeasurement, _Mapping]]] = ..., reads: _Optional[_Union[WindowReads, _Mapping]] = ...) -> None: ...

class WindowReads(_message.Message):
    __slots__ = ("window_ms", "reads", "hot_reads")
    WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    HOT_READS_FIELD_NUMBER: _ClassVar[int]
    window_ms: int
    reads: int
    hot_reads: int
    def __init__(self, window_ms: _Optional[int] = ..., reads: _Optional[int] = ..., hot_reads: _Optional[int] = ...) -> None: ...

class CacheSnapshot(_message.Message):
    __slots__ = ("seq", "keys", "first", "last")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    seq: int
    keys: bytes
    first: bool
    last: bool
    def __init__(self, seq: _Optional[int] = ..., keys: _Optional[bytes] = ..., first: _Optional[bool] = ..., last: _Optional[bool] = ...) -> None: ...

class CacheDelta(_message.Message):
    __slots__ = ("seq", "stored_keys", "removed_keys")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STORED_KEYS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_KEYS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    stored_keys: bytes
    removed_keys: bytes
    def __init__(self, seq: _Optional[int] = ..., stored_keys: _Optional[bytes] = ..., removed_keys: _Optional[bytes] = ...) -> None: ...

class PrefillMeasurement(_message.Message):
    __slots__ = ("computed_tokens", "prefix_tokens", "compute_us", "fetched_bytes", "fetch_us", "fetches")
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_US_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    computed_tokens: int
    prefix_tokens: int
    compute_us: int
    fetched_bytes: int
    fetch_us: int
    fetches: _containers.RepeatedCompositeFieldContainer[FetchMeasurement]
    def __init__(self, computed_tokens: _Optional[int] = ..., prefix_tokens: _Optional[int] = ..., compute_us: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., fetch_us: _Optional[int] = ..., fetches: _Optional[_Iterable[_Union[FetchMeasurement, _Mapping]]] = ...) -> None: ...

class FetchMeasurement(_message.Message):
    __slots__ = ("source_id", "fetched_bytes", "fetch_us")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_US_FIELD_NUMBER: _ClassVar[int]
    source_id: str
    fetched_bytes: int
    fetch_us: int
    def __init__(self, source_id: _Optional[str] = ..., fetched_bytes: _Optional[int] = ..., fetch_us: _Optional[int] = ...) -> None: ...

class FirstTokenMeasurement(_message.Message):
    __slots__ = ("placement_number", "ttft_us", "prefill_instance_id", "queue_us", "fetch_us", "compute_us", "push_us", "computed_tokens", "local_tokens", "peer_tokens", "store_tokens")
    PLACEMENT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TTFT_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    FETCH_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    PUSH_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    placement_number: int
    ttft_us: int
    prefill_instance_id: str
    queue_us: int
    fetch_us: int
    compute_us: int
    push_us: int
    computed_tokens: int
    local_tokens: int
    peer_tokens: int
    store_tokens: int
    def __init__(self, placement_number: _Optional[int] = ..., ttft_us: _Optional[int] = ..., prefill_instance_id: _Optional[str] = ..., queue_us: _Optional[int] = ..., fetch_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., push_us: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., local_tokens: _Optional[int] = ..., peer_tokens: _Optional[int] = ..., store_tokens: _Optional[int] = ...) -> None: ...

class ReportSessionResponse(_message.Message):
    __slots__ = ("lease_ms", "acked_seq", "resync", "sample_every", "copies")
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    ACKED_SEQ_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_EVERY_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    acked_seq: int
    resync: bool
    sample_every: int
    copies: CopyOrder
    def __init__(self, lease_ms: _Optional[int] = ..., acked_seq: _Optional[int] = ..., resync: _Optional[bool] = ..., sample_every: _Optional[int] = ..., copies: _Optional[_Union[CopyOrder, _Mapping]] = ...) -> None: ...

class CopyOrder(_message.Message):
    __slots__ = ("target", "reads")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    READS_FIELD_NUMBER: _ClassVar[int]
    target: str
    reads: int
    def __init__(self, target: _Optional[str] = ..., reads: _Optional[int] = ...) -> None: ...

class ListInstancesRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: _common_pb2.Role
    def __init__(self, role: _Optional[_Union[_common_pb2.Role, str]] = ...) -> None: ...

class ListInstancesResponse(_message.Message):
    __slots__ = ("version", "instances", "incomplete")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    version: int
    instances: _containers.RepeatedCompositeFieldContainer[Instance]
    incomplete: bool
    def __init__(self, version: _Optional[int] = ..., instances: _Optional[_Iterable[_Union[Instance, _Mapping]]] = ..., incomplete: _Optional[bool] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("decisions",)
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[ExplainedDecision]
    def __init__(self, decisions: _Optional[_Iterable[_Union[ExplainedDecision, _Mapping]]] = ...) -> None: ...

class ExplainedDecision(_message.Message):
    __slots__ = ("request_id", "age_ms", "model", "prompt_tokens", "block_tokens", "max_tokens", "kind", "turn", "priority", "no_reuse", "exclude_instance_ids", "because", "placement", "error", "probe", "alternate_instance_id", "ttft_limit_ms", "tbt_limit_ms", "chosen", "others", "candidates", "first_token", "shared_blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NO_REUSE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    ALTERNATE_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TTFT_LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    TBT_LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    age_ms: int
    model: str
    prompt_tokens: int
    block_tokens: int
    max_tokens: int
    kind: str
    turn: int
    priority: int
    no_reuse: bool
    exclude_instance_ids: _containers.RepeatedScalarFieldContainer[str]
    because: str
    placement: _common_pb2.Placement
    error: _common_pb2.Error
    probe: bool
    alternate_instance_id: str
    ttft_limit_ms: float
    tbt_limit_ms: float
    chosen: Candidate
    others: _containers.RepeatedCompositeFieldContainer[Candidate]
    candidates: int
    first_token: FirstTokenMeasurement
    shared_blocks: int
    def __init__(self, request_id: _Optional[str] = ..., age_ms: _Optional[int] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., kind: _Optional[str] = ..., turn: _Optional[int] = ..., priority: _Optional[int] = ..., no_reuse: _Optional[bool] = ..., exclude_instance_ids: _Optional[_Iterable[str]] = ..., because: _Optional[str] = ..., placement: _Optional[_Union[_common_pb2.Placement, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., probe: _Optional[bool] = ..., alternate_instance_id: _Optional[str] = ..., ttft_limit_ms: _Optional[float] = ..., tbt_limit_ms: _Optional[float] = ..., chosen: _Optional[_Union[Candidate, _Mapping]] = ..., others: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., candidates: _Optional[int] = ..., first_token: _Optional[_Union[FirstTokenMeasurement, _Mapping]] = ..., shared_blocks: _Optional[int] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("instance_id", "held_blocks", "expected_blocks", "fetched_blocks", "room_ms", "queue_ms", "transfer_ms", "prefill_ms", "drain_ms", "ttft_ms", "others_ms", "about")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ROOM_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DRAIN_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_MS_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    held_blocks: int
    expected_blocks: int
    fetched_blocks: int
    room_ms: float
    queue_ms: float
    transfer_ms: float
    prefill_ms: float
    drain_ms: float
    ttft_ms: float
    others_ms: float
    about: bool
    def __init__(self, instance_id: _Optional[str] = ..., held_blocks: _Optional[int] = ..., expected_blocks: _Optional[int] = ..., fetched_blocks: _Optional[int] = ..., room_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., drain_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., others_ms: _Optional[float] = ..., about: _Optional[bool] = ...) -> None: ...
