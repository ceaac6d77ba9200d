from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Layout(_message.Message):
    __slots__ = ("shape", "dtype", "itemsize")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ITEMSIZE_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    itemsize: int
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., itemsize: _Optional[int] = ...) -> None: ...

class Handle(_message.Message):
    __slots__ = ("id", "owner", "incarnation", "address", "nbytes", "layout", "meta", "descriptors")
    class DescriptorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    META_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTORS_FIELD_NUMBER: _ClassVar[int]
    id: int
    owner: str
    incarnation: int
    address: str
    nbytes: int
    layout: Layout
    meta: bytes
    descriptors: _containers.ScalarMap[str, bytes]
    def __init__(self, id: _Optional[int] = ..., owner: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ..., nbytes: _Optional[int] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., meta: _Optional[bytes] = ..., descriptors: _Optional[_Mapping[str, bytes]] = ...) -> None: ...
