from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LbState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LB_STATE_UNSPECIFIED: _ClassVar[LbState]
    LB_STATE_LIVE: _ClassVar[LbState]
    LB_STATE_DRAINING: _ClassVar[LbState]
    LB_STATE_FAILED: _ClassVar[LbState]
    LB_STATE_LEFT: _ClassVar[LbState]
LB_STATE_UNSPECIFIED: LbState
LB_STATE_LIVE: LbState
LB_STATE_DRAINING: LbState
LB_STATE_FAILED: LbState
LB_STATE_LEFT: LbState

class SessionRequest(_message.Message):
    __slots__ = ("registration", "load", "latencies_ms", "draining", "leaving", "known")
    class LatenciesMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_MS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    registration: LoadBalancerInfo
    load: LoadBalancerLoad
    latencies_ms: _containers.ScalarMap[str, float]
    draining: bool
    leaving: bool
    known: Federation
    def __init__(self, registration: _Optional[_Union[LoadBalancerInfo, _Mapping]] = ..., load: _Optional[_Union[LoadBalancerLoad, _Mapping]] = ..., latencies_ms: _Optional[_Mapping[str, float]] = ..., draining: _Optional[bool] = ..., leaving: _Optional[bool] = ..., known: _Optional[_Union[Federation, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("epoch", "version", "lease_ms", "federation")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    version: int
    lease_ms: int
    federation: Federation
    def __init__(self, epoch: _Optional[str] = ..., version: _Optional[int] = ..., lease_ms: _Optional[int] = ..., federation: _Optional[_Union[Federation, _Mapping]] = ...) -> None: ...

class LoadBalancerInfo(_message.Message):
    __slots__ = ("lb_id", "boot_id", "region", "grpc_address", "http_url", "clusters", "position")
    LB_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_URL_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    lb_id: str
    boot_id: str
    region: str
    grpc_address: str
    http_url: str
    clusters: _containers.RepeatedCompositeFieldContainer[OwnedCluster]
    position: Position
    def __init__(self, lb_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., region: _Optional[str] = ..., grpc_address: _Optional[str] = ..., http_url: _Optional[str] = ..., clusters: _Optional[_Iterable[_Union[OwnedCluster, _Mapping]]] = ..., position: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("latitude", "longitude")
    LATITUDE_FIELD_NUMBER: _ClassVar[int]
    LONGITUDE_FIELD_NUMBER: _ClassVar[int]
    latitude: float
    longitude: float
    def __init__(self, latitude: _Optional[float] = ..., longitude: _Optional[float] = ...) -> None: ...

class OwnedCluster(_message.Message):
    __slots__ = ("name", "conductor", "upstream_urls")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONDUCTOR_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_URLS_FIELD_NUMBER: _ClassVar[int]
    name: str
    conductor: str
    upstream_urls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., conductor: _Optional[str] = ..., upstream_urls: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadBalancerLoad(_message.Message):
    __slots__ = ("queue", "in_flight", "available_instances", "instances", "forwarded_total", "accepted_total", "hit_chunks_total", "asked_chunks_total", "forwarded_by_region", "accepted_by_region", "per_instance")
    class ForwardedByRegionEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class AcceptedByRegionEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HIT_CHUNKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ASKED_CHUNKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FORWARDED_BY_REGION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_REGION_FIELD_NUMBER: _ClassVar[int]
    PER_INSTANCE_FIELD_NUMBER: _ClassVar[int]
    queue: int
    in_flight: int
    available_instances: int
    instances: int
    forwarded_total: int
    accepted_total: int
    hit_chunks_total: int
    asked_chunks_total: int
    forwarded_by_region: _containers.ScalarMap[str, int]
    accepted_by_region: _containers.ScalarMap[str, int]
    per_instance: _containers.RepeatedCompositeFieldContainer[InstanceLoad]
    def __init__(self, queue: _Optional[int] = ..., in_flight: _Optional[int] = ..., available_instances: _Optional[int] = ..., instances: _Optional[int] = ..., forwarded_total: _Optional[int] = ..., accepted_total: _Optional[int] = ..., hit_chunks_total: _Optional[int] = ..., asked_chunks_total: _Optional[int] = ..., forwarded_by_region: _Optional[_Mapping[str, int]] = ..., accepted_by_region: _Optional[_Mapping[str, int]] = ..., per_instance: _Optional[_Iterable[_Union[InstanceLoad, _Mapping]]] = ...) -> None: ...

class InstanceLoad(_message.Message):
    __slots__ = ("name", "pending", "running", "outstanding", "available")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    pending: int
    running: int
    outstanding: int
    available: bool
    def __init__(self, name: _Optional[str] = ..., pending: _Optional[int] = ..., running: _Optional[int] = ..., outstanding: _Optional[int] = ..., available: _Optional[bool] = ...) -> None: ...

class Federation(_message.Message):
    __slots__ = ("epoch", "version", "regions", "load_balancers", "clusters")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    LOAD_BALANCERS_FIELD_NUMBER: _ClassVar[int]
    CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    version: int
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    load_balancers: _containers.RepeatedCompositeFieldContainer[LoadBalancer]
    clusters: _containers.RepeatedCompositeFieldContainer[Cluster]
    def __init__(self, epoch: _Optional[str] = ..., version: _Optional[int] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ..., load_balancers: _Optional[_Iterable[_Union[LoadBalancer, _Mapping]]] = ..., clusters: _Optional[_Iterable[_Union[Cluster, _Mapping]]] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("name", "tags", "position")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    name: str
    tags: _containers.RepeatedScalarFieldContainer[str]
    position: Position
    def __init__(self, name: _Optional[str] = ..., tags: _Optional[_Iterable[str]] = ..., position: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class LoadBalancer(_message.Message):
    __slots__ = ("info", "state", "connected", "displaced_boot_ids")
    INFO_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    DISPLACED_BOOT_IDS_FIELD_NUMBER: _ClassVar[int]
    info: LoadBalancerInfo
    state: LbState
    connected: bool
    displaced_boot_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, info: _Optional[_Union[LoadBalancerInfo, _Mapping]] = ..., state: _Optional[_Union[LbState, str]] = ..., connected: _Optional[bool] = ..., displaced_boot_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class Cluster(_message.Message):
    __slots__ = ("region", "name", "conductor", "upstream_urls", "removed_instances", "added_instances", "owner_ids", "adopter_id")
    REGION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONDUCTOR_FIELD_NUMBER: _ClassVar[int]
    UPSTREAM_URLS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    ADDED_INSTANCES_FIELD_NUMBER: _ClassVar[int]
    OWNER_IDS_FIELD_NUMBER: _ClassVar[int]
    ADOPTER_ID_FIELD_NUMBER: _ClassVar[int]
    region: str
    name: str
    conductor: str
    upstream_urls: _containers.RepeatedScalarFieldContainer[str]
    removed_instances: _containers.RepeatedScalarFieldContainer[str]
    added_instances: _containers.RepeatedScalarFieldContainer[str]
    owner_ids: _containers.RepeatedScalarFieldContainer[str]
    adopter_id: str
    def __init__(self, region: _Optional[str] = ..., name: _Optional[str] = ..., conductor: _Optional[str] = ..., upstream_urls: _Optional[_Iterable[str]] = ..., removed_instances: _Optional[_Iterable[str]] = ..., added_instances: _Optional[_Iterable[str]] = ..., owner_ids: _Optional[_Iterable[str]] = ..., adopter_id: _Optional[str] = ...) -> None: ...

class ListRegionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRegionsResponse(_message.Message):
    __slots__ = ("federation", "reports", "settling")
    class ReportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: LoadBalancerReport
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[LoadBalancerReport, _Mapping]] = ...) -> None: ...
    FEDERATION_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    SETTLING_FIELD_NUMBER: _ClassVar[int]
    federation: Federation
    reports: _containers.MessageMap[str, LoadBalancerReport]
    settling: bool
    def __init__(self, federation: _Optional[_Union[Federation, _Mapping]] = ..., reports: _Optional[_Mapping[str, LoadBalancerReport]] = ..., settling: _Optional[bool] = ...) -> None: ...

class LoadBalancerReport(_message.Message):
    __slots__ = ("load", "age_ms", "latencies_ms")
    class LatenciesMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    LOAD_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LATENCIES_MS_FIELD_NUMBER: _ClassVar[int]
    load: LoadBalancerLoad
    age_ms: int
    latencies_ms: _containers.ScalarMap[str, float]
    def __init__(self, load: _Optional[_Union[LoadBalancerLoad, _Mapping]] = ..., age_ms: _Optional[int] = ..., latencies_ms: _Optional[_Mapping[str, float]] = ...) -> None: ...

class AddInstanceRequest(_message.Message):
    __slots__ = ("region", "cluster", "instance")
    REGION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    region: str
    cluster: str
    instance: str
    def __init__(self, region: _Optional[str] = ..., cluster: _Optional[str] = ..., instance: _Optional[str] = ...) -> None: ...

class AddInstanceResponse(_message.Message):
    __slots__ = ("version", "changed")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    version: int
    changed: bool
    def __init__(self, version: _Optional[int] = ..., changed: _Optional[bool] = ...) -> None: ...

class RemoveInstanceRequest(_message.Message):
    __slots__ = ("region", "cluster", "instance")
    REGION_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    region: str
    cluster: str
    instance: str
    def __init__(self, region: _Optional[str] = ..., cluster: _Optional[str] = ..., instance: _Optional[str] = ...) -> None: ...

class RemoveInstanceResponse(_message.Message):
    __slots__ = ("version", "changed")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    version: int
    changed: bool
    def __init__(self, version: _Optional[int] = ..., changed: _Optional[bool] = ...) -> None: ...

class ForgetLoadBalancerRequest(_message.Message):
    __slots__ = ("lb_id",)
    LB_ID_FIELD_NUMBER: _ClassVar[int]
    lb_id: str
    def __init__(self, lb_id: _Optional[str] = ...) -> None: ...

class ForgetLoadBalancerResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...
