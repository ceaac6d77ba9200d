"""Which transports there are, and that each of them passes the contract."""

from __future__ import annotations

import importlib.util
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from tensorlink.errors import TransportError
from tensorlink.testing import TransportContract
from tensorlink.transports import registry
from tensorlink.transports.base import Transport


class Incomplete(Transport):
    name = "incomplete"

    def address(self) -> bytes:
        return b""


def contracts(kind: type = TransportContract) -> set[type]:
    return {one for sub in kind.__subclasses__() for one in (sub, *contracts(sub))}


def test_every_registered_transport_is_under_contract() -> None:
    modules = []  # classes die with their modules
    for path in Path(__file__).parent.glob("test_*.py"):
        spec = importlib.util.spec_from_file_location(f"contract_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        modules.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(modules[-1])
    tested = {kind.transport for kind in contracts() if kind.__name__.startswith("Test")}
    assert set(registry.installed()) <= tested, "each needs a subclass of TransportContract among the tests"


def test_ours_are_installed() -> None:
    assert {"local", "shm"} <= set(registry.installed())
    for name in registry.installed():
        assert registry.load(name).name == name


def test_an_unknown_name_lists_those_that_are_installed() -> None:
    with pytest.raises(TransportError, match="no transport 'carrier-pigeon' is installed; there are: .*local.*shm"):
        registry.load("carrier-pigeon")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module_at_all:Thing", "'odd' cannot be loaded: No module named 'no_such_module_at_all'"),
        ("tensorlink.transports.base:Nothing", "'odd' cannot be loaded: .*Nothing"),
        ("json:dumps", "'odd' is no Transport class but"),
        ("json:JSONEncoder", "'odd' is no Transport class but"),
        (f"{__name__}:Incomplete", "'odd' lacks close, connect, links, reaches"),
    ],
)
def test_a_bad_plugin_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, target: str, message: str) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint("odd", target, group)])
    with pytest.raises(TransportError, match=message):
        registry.load("odd")


def test_the_first_of_two_with_one_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("shm", "tensorlink.transports.shm:ShmTransport", "g"), EntryPoint("shm", "other:Other", "g")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert registry.load("shm").name == "shm"


def test_looking_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [EntryPoint("odd", "no_such_module:X", group)])
    assert set(registry.installed()) == {"odd"}
