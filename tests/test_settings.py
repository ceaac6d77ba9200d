"""Settings: where each value comes from, and what is refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tensorlink.settings import Settings, memory_limit_bytes

GIB = 2**30


def test_defaults() -> None:
    settings = Settings.load({})
    assert settings == Settings()
    assert settings.timeout == 60.0
    assert settings.lease_s == 5.0
    assert 0 < settings.pool_bytes <= memory_limit_bytes() // 4


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("TENSORLINK_COORDINATOR", "host:1234", "coordinator", "host:1234"),
        ("TENSORLINK_TRANSPORTS", "^shm", "transports", "^shm"),
        ("TENSORLINK_TOKEN", "secret", "token", "secret"),
        ("TENSORLINK_TIMEOUT", "2.5", "timeout", 2.5),
        ("TENSORLINK_POOL_BYTES", "1048576", "pool_bytes", 1048576),
        ("TENSORLINK_NAMESPACE", "job-1.b", "namespace", "job-1.b"),
        ("TENSORLINK_LEASE_S", "1", "lease_s", 1.0),
        ("TENSORLINK_CONTROL", "grpc", "control", "grpc"),
        ("TENSORLINK_LOG", "debug", "log", "debug"),
        ("TENSORLINK_INTERFACE", "fe80::1%eth0", "interface", "fe80::1%eth0"),
        ("TENSORLINK_PORTS", "20000-20100", "ports", "20000-20100"),
        ("TENSORLINK_VERIFY", "1", "verify", True),
        ("TENSORLINK_MAX_BYTES_PER_S", "1000000", "max_bytes_per_s", 1_000_000),
        ("TENSORLINK_LABELS", "rack=7, zone=eu-1a,", "labels", {"rack": "7", "zone": "eu-1a"}),
    ],
)
def test_environment(variable: str, text: str, name: str, value: object) -> None:
    assert getattr(Settings.load({variable: text}), name) == value
    assert Settings.load({variable: ""}) == Settings()


def test_every_field_is_read_from_the_environment() -> None:
    texts = {"timeout": "1", "lease_s": "1", "pool_bytes": "1", "control": "grpc", "log": "INFO"}
    texts |= {
        "coordinator": "x:1",
        "ports": "1-2",
        "verify": "1",
        "max_bytes_per_s": "1",
        "labels": "rack=7",
        "paths": "x=tcp",
    }
    env = {f"TENSORLINK_{spec.name.upper()}": texts.get(spec.name, "x") for spec in fields(Settings)}
    default, loaded = Settings(), Settings.load(env)
    assert [spec.name for spec in fields(Settings) if getattr(loaded, spec.name) == getattr(default, spec.name)] == []


def test_arguments_come_first_and_none_means_absent() -> None:
    env = {"TENSORLINK_TIMEOUT": "7", "TENSORLINK_TOKEN": "env"}
    settings = Settings.load(env, timeout=3.0, token=None)
    assert (settings.timeout, settings.token) == (3.0, "env")


def test_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLINK_NAMESPACE", "mine")
    assert Settings.load().namespace == "mine"


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("TENSORLINK_TIMEOUT", "soon"),
        ("TENSORLINK_POOL_BYTES", "1.5"),
        ("TENSORLINK_LEASE_S", "5s"),
        ("TENSORLINK_LABELS", "rack"),
    ],
)
def test_unparsable_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"{variable} must be [\w =,]+, not '{text}'"):
        Settings.load({variable: text})


@pytest.mark.parametrize(
    "arguments",
    [
        {"timeout": 0},
        {"timeout": -1.0},
        {"timeout": float("nan")},
        {"timeout": float("inf")},
        {"lease_s": 0},
        {"pool_bytes": 0},
        {"control": "carrier pigeon"},
        {"log": "LOUD"},
        {"coordinator": "host"},
        {"coordinator": "::1:4000"},
        {"coordinator": "host:65536"},
        {"interface": "eth 0"},
        {"interface": "an-interface-name-too-long"},
        {"interface": "0.0.0.0"},
        {"ports": "20000"},
        {"ports": "0-10"},
        {"ports": "20-10"},
        {"ports": "20000-65536"},
        {"namespace": ""},
        {"namespace": ".."},
        {"namespace": "a/b"},
        {"namespace": "a\0b"},
        {"namespace": "ж"},
        {"namespace": "a" * 65},
    ],
    ids=str,
)
def test_bad_value_is_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Settings(**arguments)


def test_unknown_argument() -> None:
    with pytest.raises(TypeError, match="unknown settings: colour"):
        Settings.load({}, colour="red")


@pytest.mark.parametrize(
    ("transports", "allowed", "refused"),
    [
        (None, ["shm", "local", "x"], []),
        ("shm, local", ["shm", "local"], ["x", "sh"]),
        ("^shm", ["local", "x"], ["shm"]),
        ("^shm,x", ["local"], ["shm", "x"]),
    ],
)
def test_allows(transports: str | None, allowed: list[str], refused: list[str]) -> None:
    settings = Settings(transports=transports)
    assert [name for name in allowed + refused if settings.allows(name)] == allowed


def test_token_is_not_shown() -> None:
    assert "secret" not in repr(Settings(token="secret"))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_memory_limit_is_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    write(groups / "memory.max", "max\n")
    write(groups / "job" / "memory.max", f"{GIB // 2}\n")
    write(groups / "job" / "task" / "memory.max", f"{GIB}\n")
    write(groups / "other" / "memory.max", "4096\n")
    assert memory_limit_bytes(groups, write(tmp_path / "own", "0::/job/task\n")) == GIB // 2
    assert memory_limit_bytes(groups, write(tmp_path / "own", "0::/elsewhere\n")) == memory_limit_bytes(
        tmp_path / "none"
    )


def test_memory_limit_of_an_older_cgroup(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    write(groups / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    write(groups / "memory" / "job" / "memory.limit_in_bytes", f"{GIB // 4}\n")
    assert memory_limit_bytes(groups, write(tmp_path / "own", "5:cpu,memory:/job\n3:cpuset:/\n")) == GIB // 4


def test_memory_limit_in_a_container_that_sees_only_its_own_group(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    write(groups / "memory.max", f"{GIB // 8}\n")
    assert memory_limit_bytes(groups, write(tmp_path / "own", "0::/on/the/host\n")) == GIB // 8
    assert memory_limit_bytes(groups, tmp_path / "no proc") == GIB // 8


def test_paths_are_allowed_by_peer() -> None:
    """The first rule that fits counts, beside `transports`, which counts for all."""
    settings = Settings(transports="^shm", paths="trainer = tcp;rollout[0-9]=^tcp, x; rollout*=shm; a=b=x")
    allowed = {
        peer: [name for name in ("shm", "tcp", "x") if settings.allows(name, peer)]
        for peer in ("trainer", "rollout1", "rollout-a", "other", "a=b", None)
    }
    some = ["tcp", "x"]
    assert allowed == {"trainer": ["tcp"], "rollout1": [], "rollout-a": [], "other": some, "a=b": ["x"], None: some}
    settings.check_transports({"shm", "tcp", "x"})
    with pytest.raises(ValueError, match="no transport 'x' is installed"):
        settings.check_transports({"shm", "tcp"})


@pytest.mark.parametrize("text", ["trainer", "=tcp", "trainer=", "trainer=^", "trainer=tcp; tcp"])
def test_paths_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"paths \(TENSORLINK_PATHS\) must be like trainer=tcp"):
        Settings(paths=text)
    assert Settings(paths=" ; ").allows("shm", "trainer")
