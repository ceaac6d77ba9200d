"""The error tree: what each is caught as, what its text says, and that all of them survive pickling."""

from __future__ import annotations

import copy
import pickle

import pytest

from tensorlink import errors
from tensorlink.errors import TensorLinkError, TransportError

BUILTINS = {
    "ClosedError": (),
    "NameInUseError": (),
    "PeerUnknownError": (LookupError,),
    "PeerLostError": (ConnectionError,),
    "PeerRestartedError": (errors.PeerLostError, ConnectionError),
    "StaleRefError": (LookupError,),
    "TransferTimeoutError": (TimeoutError,),
    "TransferCancelledError": (),
    "LayoutMismatchError": (ValueError,),
    "NoPathError": (),
    "PoolExhaustedError": (MemoryError,),
    "AuthenticationError": (PermissionError,),
    "CorruptTransferError": (),
    "TopologyError": (ValueError,),
    "TransportError": (),
}
ALL = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, TensorLinkError)]


def test_table_is_complete() -> None:
    assert {error.__name__ for error in ALL} == {"TensorLinkError", *BUILTINS}


@pytest.mark.parametrize("name", BUILTINS)
def test_is_caught_as(name: str) -> None:
    for base in (TensorLinkError, *BUILTINS[name]):
        assert issubclass(getattr(errors, name), base)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("clone", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_survives_pickling(kind: type[TensorLinkError], clone: object) -> None:
    assert callable(clone)
    error = kind("it broke", peer="b#7", transport="shm", phase="map", hint="Try again")
    again = clone(error)
    assert type(again) is kind
    assert vars(again) == vars(error)
    assert str(again) == str(error)
    assert again.args == ("it broke",)


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_fields_default_to_none(kind: type[TensorLinkError]) -> None:
    error = kind("it broke")
    assert str(error) == "it broke"
    assert (error.message, error.peer, error.transport, error.phase, error.hint) == ("it broke", None, None, None, None)


def test_text_names_place_and_next_step() -> None:
    error = TensorLinkError("it broke", peer="b#7", transport="shm", phase="map", hint="Try again")
    assert str(error) == "it broke [peer b#7, transport shm, phase map]. Try again"


@pytest.mark.parametrize(
    ("message", "peer", "text"),
    [
        ("peer 'b' died", "b", "peer 'b' died"),
        ("peer b#7 died", "b#7", "peer b#7 died"),
        ("peer b#71 died", "b#7", "peer b#71 died [peer b#7]"),
        ("a transfer failed", "a", "a transfer failed [peer a]"),
        ("transfer failed", "fail", "transfer failed [peer fail]"),
    ],
)
def test_text_says_each_thing_once(message: str, peer: str, text: str) -> None:
    assert str(TensorLinkError(message, peer=peer)) == text


def test_text_has_one_full_stop_before_the_hint() -> None:
    assert str(TensorLinkError("It broke.", hint="Try again")) == "It broke. Try again"


def test_native_code_survives_pickling() -> None:
    error = TransportError("connect failed", code=111, transport="tcp")
    assert pickle.loads(pickle.dumps(error)).code == 111
    assert TransportError("connect failed").code is None
