from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Peer(_message.Message):
    __slots__ = ("name", "incarnation", "address", "host", "pid", "services", "labels", "links", "leaving")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    address: str
    host: str
    pid: int
    services: _containers.RepeatedScalarFieldContainer[str]
    labels: _containers.ScalarMap[str, str]
    links: bytes
    leaving: bool
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., services: _Optional[_Iterable[str]] = ..., labels: _Optional[_Mapping[str, str]] = ..., links: _Optional[bytes] = ..., leaving: bool = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("version", "peer", "nonce", "known", "utc_us")
    class KnownEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    UTC_US_FIELD_NUMBER: _ClassVar[int]
    version: int
    peer: Peer
    nonce: bytes
    known: _containers.ScalarMap[str, int]
    utc_us: int
    def __init__(self, version: _Optional[int] = ..., peer: _Optional[_Union[Peer, _Mapping]] = ..., nonce: _Optional[bytes] = ..., known: _Optional[_Mapping[str, int]] = ..., utc_us: _Optional[int] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("incarnation", "lease_key", "lease_s", "heartbeat_address", "version", "expelled")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_KEY_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EXPELLED_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    lease_key: bytes
    lease_s: float
    heartbeat_address: str
    version: int
    expelled: bool
    def __init__(self, incarnation: _Optional[int] = ..., lease_key: _Optional[bytes] = ..., lease_s: _Optional[float] = ..., heartbeat_address: _Optional[str] = ..., version: _Optional[int] = ..., expelled: bool = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("lease_key",)
    LEASE_KEY_FIELD_NUMBER: _ClassVar[int]
    lease_key: bytes
    def __init__(self, lease_key: _Optional[bytes] = ...) -> None: ...

class ResolveRequest(_message.Message):
    __slots__ = ("name", "wait_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    wait_s: float
    def __init__(self, name: _Optional[str] = ..., wait_s: _Optional[float] = ...) -> None: ...

class FindRequest(_message.Message):
    __slots__ = ("service", "wait_s")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    service: str
    wait_s: float
    def __init__(self, service: _Optional[str] = ..., wait_s: _Optional[float] = ...) -> None: ...

class AdvertiseRequest(_message.Message):
    __slots__ = ("lease_key", "add", "remove", "leaving")
    LEASE_KEY_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    lease_key: bytes
    add: _containers.RepeatedScalarFieldContainer[str]
    remove: _containers.RepeatedScalarFieldContainer[str]
    leaving: bool
    def __init__(self, lease_key: _Optional[bytes] = ..., add: _Optional[_Iterable[str]] = ..., remove: _Optional[_Iterable[str]] = ..., leaving: bool = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("kind", "peer", "reason")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Change.Kind]
        UP: _ClassVar[Change.Kind]
        DOWN: _ClassVar[Change.Kind]
        UPDATED: _ClassVar[Change.Kind]
    UNKNOWN: Change.Kind
    UP: Change.Kind
    DOWN: Change.Kind
    UPDATED: Change.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: Change.Kind
    peer: Peer
    reason: str
    def __init__(self, kind: _Optional[_Union[Change.Kind, str]] = ..., peer: _Optional[_Union[Peer, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("epoch", "lease_s", "peers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    lease_s: float
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, epoch: _Optional[bytes] = ..., lease_s: _Optional[float] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class WatchReply(_message.Message):
    __slots__ = ("snapshot", "change")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    change: Change
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., change: _Optional[_Union[Change, _Mapping]] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("version", "name", "incarnation", "host", "connect")
    class ConnectEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    version: int
    name: str
    incarnation: int
    host: str
    connect: _containers.ScalarMap[str, bytes]
    def __init__(self, version: _Optional[int] = ..., name: _Optional[str] = ..., incarnation: _Optional[int] = ..., host: _Optional[str] = ..., connect: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("version", "name", "incarnation", "connect", "max_bytes_per_s")
    class ConnectEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    version: int
    name: str
    incarnation: int
    connect: _containers.ScalarMap[str, bytes]
    max_bytes_per_s: int
    def __init__(self, version: _Optional[int] = ..., name: _Optional[str] = ..., incarnation: _Optional[int] = ..., connect: _Optional[_Mapping[str, bytes]] = ..., max_bytes_per_s: _Optional[int] = ...) -> None: ...

class DeliverRequest(_message.Message):
    __slots__ = ("source", "incarnation", "sequence", "tag", "frame")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    source: str
    incarnation: int
    sequence: int
    tag: str
    frame: bytes
    def __init__(self, source: _Optional[str] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ..., tag: _Optional[str] = ..., frame: _Optional[bytes] = ...) -> None: ...

class DeliverReply(_message.Message):
    __slots__ = ("ack",)
    ACK_FIELD_NUMBER: _ClassVar[int]
    ack: bytes
    def __init__(self, ack: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("source", "incarnation", "ids")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    source: str
    incarnation: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, source: _Optional[str] = ..., incarnation: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ...) -> None: ...

class MailboxFrame(_message.Message):
    __slots__ = ("source", "incarnation", "transport", "data")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    source: str
    incarnation: int
    transport: str
    data: bytes
    def __init__(self, source: _Optional[str] = ..., incarnation: _Optional[int] = ..., transport: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ("padding",)
    PADDING_FIELD_NUMBER: _ClassVar[int]
    padding: bytes
    def __init__(self, padding: _Optional[bytes] = ...) -> None: ...

class PingReply(_message.Message):
    __slots__ = ("name", "incarnation", "release", "utc_us", "mtu", "padding")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    UTC_US_FIELD_NUMBER: _ClassVar[int]
    MTU_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: int
    release: str
    utc_us: int
    mtu: int
    padding: bytes
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[int] = ..., release: _Optional[str] = ..., utc_us: _Optional[int] = ..., mtu: _Optional[int] = ..., padding: _Optional[bytes] = ...) -> None: ...

class ScratchRequest(_message.Message):
    __slots__ = ("source", "incarnation", "nbytes")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    source: str
    incarnation: int
    nbytes: int
    def __init__(self, source: _Optional[str] = ..., incarnation: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class ScratchReply(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    def __init__(self, handle: _Optional[bytes] = ...) -> None: ...
