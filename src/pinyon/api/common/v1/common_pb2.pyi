from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_MIXED: _ClassVar[Role]
    ROLE_STORE: _ClassVar[Role]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class KvSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_SOURCE_UNSPECIFIED: _ClassVar[KvSource]
    KV_SOURCE_LOCAL: _ClassVar[KvSource]
    KV_SOURCE_PEER: _ClassVar[KvSource]
    KV_SOURCE_STORE: _ClassVar[KvSource]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_MIXED: Role
ROLE_STORE: Role
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_ERROR: FinishReason
KV_SOURCE_UNSPECIFIED: KvSource
KV_SOURCE_LOCAL: KvSource
KV_SOURCE_PEER: KvSource
KV_SOURCE_STORE: KvSource

class Error(_message.Message):
    __slots__ = ("code", "message", "field", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    field: str
    retry_after_ms: int
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_k", "top_p", "seed", "stop", "ignore_eos", "min_p", "min_tokens", "stop_token_ids", "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs", "prompt_logprobs")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    min_p: float
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    logprobs: int
    prompt_logprobs: bool
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., min_p: _Optional[float] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[bool] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token", "bias")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token: int
    bias: float
    def __init__(self, token: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("logprobs", "top_count", "top_tokens", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_count: int
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., top_count: _Optional[int] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class RequestClass(_message.Message):
    __slots__ = ("kind", "turn", "session", "user", "priority", "arrived_unix_s", "tenant", "geographies", "cache_salt", "no_store")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    GEOGRAPHIES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    NO_STORE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    turn: int
    session: str
    user: str
    priority: int
    arrived_unix_s: float
    tenant: str
    geographies: _containers.RepeatedScalarFieldContainer[str]
    cache_salt: str
    no_store: bool
    def __init__(self, kind: _Optional[str] = ..., turn: _Optional[int] = ..., session: _Optional[str] = ..., user: _Optional[str] = ..., priority: _Optional[int] = ..., arrived_unix_s: _Optional[float] = ..., tenant: _Optional[str] = ..., geographies: _Optional[_Iterable[str]] = ..., cache_salt: _Optional[str] = ..., no_store: _Optional[bool] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "cached_local_tokens", "cached_peer_tokens", "cached_store_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_STORE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_local_tokens: int
    cached_peer_tokens: int
    cached_store_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., cached_local_tokens: _Optional[int] = ..., cached_peer_tokens: _Optional[int] = ..., cached_store_tokens: _Optional[int] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("layers", "kv_heads", "head_dim", "block_tokens", "dtype", "packing", "packed_bytes")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PACKING_FIELD_NUMBER: _ClassVar[int]
    PACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    packing: str
    packed_bytes: int
    def __init__(self, layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_tokens: _Optional[int] = ..., dtype: _Optional[str] = ..., packing: _Optional[str] = ..., packed_bytes: _Optional[int] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("key", "location", "length_bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    location: str
    length_bytes: int
    def __init__(self, key: _Optional[bytes] = ..., location: _Optional[str] = ..., length_bytes: _Optional[int] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("host", "port", "boot_id", "regions", "nics", "topology", "shm_address", "host_id")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    NICS_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    SHM_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    boot_id: str
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    nics: _containers.RepeatedCompositeFieldContainer[Nic]
    topology: _containers.RepeatedCompositeFieldContainer[MemoryAffinity]
    shm_address: str
    host_id: str
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., boot_id: _Optional[str] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ..., nics: _Optional[_Iterable[_Union[Nic, _Mapping]]] = ..., topology: _Optional[_Iterable[_Union[MemoryAffinity, _Mapping]]] = ..., shm_address: _Optional[str] = ..., host_id: _Optional[str] = ...) -> None: ...

class Nic(_message.Message):
    __slots__ = ("name", "transport", "address", "port", "network")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    name: str
    transport: str
    address: str
    port: int
    network: str
    def __init__(self, name: _Optional[str] = ..., transport: _Optional[str] = ..., address: _Optional[str] = ..., port: _Optional[int] = ..., network: _Optional[str] = ...) -> None: ...

class MemoryAffinity(_message.Message):
    __slots__ = ("location", "preferred_nics", "secondary_nics")
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    PREFERRED_NICS_FIELD_NUMBER: _ClassVar[int]
    SECONDARY_NICS_FIELD_NUMBER: _ClassVar[int]
    location: str
    preferred_nics: _containers.RepeatedScalarFieldContainer[str]
    secondary_nics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, location: _Optional[str] = ..., preferred_nics: _Optional[_Iterable[str]] = ..., secondary_nics: _Optional[_Iterable[str]] = ...) -> None: ...

class FetchSpan(_message.Message):
    __slots__ = ("source_id", "source_address", "source", "first_block", "block_count")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    source_id: str
    source_address: str
    source: KvSource
    first_block: int
    block_count: int
    def __init__(self, source_id: _Optional[str] = ..., source_address: _Optional[str] = ..., source: _Optional[_Union[KvSource, str]] = ..., first_block: _Optional[int] = ..., block_count: _Optional[int] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("prefill_instance_id", "prefill_address", "decode_instance_id", "decode_address", "fetches", "local_prefix_blocks", "predicted_ttft_ms", "predicted_tbt_ms", "policy", "predicted_prefill_ms", "ttft_slo_ms", "number", "ask_store")
    PREFILL_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFIX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TBT_MS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ASK_STORE_FIELD_NUMBER: _ClassVar[int]
    prefill_instance_id: str
    prefill_address: str
    decode_instance_id: str
    decode_address: str
    fetches: _containers.RepeatedCompositeFieldContainer[FetchSpan]
    local_prefix_blocks: int
    predicted_ttft_ms: float
    predicted_tbt_ms: float
    policy: str
    predicted_prefill_ms: float
    ttft_slo_ms: int
    number: int
    ask_store: bool
    def __init__(self, prefill_instance_id: _Optional[str] = ..., prefill_address: _Optional[str] = ..., decode_instance_id: _Optional[str] = ..., decode_address: _Optional[str] = ..., fetches: _Optional[_Iterable[_Union[FetchSpan, _Mapping]]] = ..., local_prefix_blocks: _Optional[int] = ..., predicted_ttft_ms: _Optional[float] = ..., predicted_tbt_ms: _Optional[float] = ..., policy: _Optional[str] = ..., predicted_prefill_ms: _Optional[float] = ..., ttft_slo_ms: _Optional[int] = ..., number: _Optional[int] = ..., ask_store: _Optional[bool] = ...) -> None: ...
