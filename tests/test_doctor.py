"""The doctor: each check under facts of both kinds, and the command run here, with and without a peer."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tensorlink as tl
from tensorlink import network
from tensorlink.doctor import examine, limits, memory, peer, reach, security
from tensorlink.doctor.finding import Finding, guarded, worst
from tensorlink.settings import Settings
from tests.authority import Authority, authority, other
from tests.cluster import Cluster, cluster, networks
from tests.facts import write
from tests.hosts import Host
from tests.joined import join
from tests.peer import ROOT, Peer, nursery, spawn

__all__ = ["authority", "cluster", "join", "networks", "nursery", "other", "spawn"]

pytestmark = pytest.mark.usefixtures("nursery")

NONE = -1
GIB = 1 << 30
TOKEN = "0123456789abcdef0123456789abcdef"


# Limits


@pytest.mark.parametrize(
    "soft, hard, verdict, mend",
    [
        (NONE, NONE, "ok", None),
        (1024, 4096, "ok", None),
        (256, 4096, "warn", "ulimit -n 1024"),
        (256, 512, "warn", "ulimit -n 512"),
        (64, NONE, "fail", "ulimit -n 1024"),
    ],
)
def test_open_files(soft: int, hard: int, verdict: str, mend: str | None) -> None:
    found = limits.open_files(soft, hard)
    assert (found.verdict, found.mend) == (verdict, mend)


def test_open_files_where_the_hard_limit_is_low() -> None:
    assert "as root" in str(limits.open_files(256, 256).mend)


@pytest.mark.parametrize("soft, verdict", [(NONE, "ok"), (GIB, "ok"), (GIB - 1, "warn"), (0, "fail")])
def test_file_size(soft: int, verdict: str) -> None:
    assert limits.file_size(soft, GIB).verdict == verdict


@pytest.mark.parametrize("soft, verdict", [(NONE, "ok"), (8 << 20, "note")])
def test_locked_memory(soft: int, verdict: str) -> None:
    assert limits.locked_memory(soft).verdict == verdict


# Memory


def test_shared_memory_of_this_machine() -> None:
    assert memory.shared_memory(Path("/")).verdict == "ok"


@pytest.mark.parametrize("sysctl, mend", [("2", "sysctl vm.memfd_noexec=1"), ("0", None)])
def test_shared_memory_that_is_refused(tmp_path: Path, sysctl: str, mend: str | None) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    found = memory.shared_memory(write(tmp_path, proc__sys__vm__memfd_noexec=sysctl), refuse)
    assert (found.verdict, found.mend) == ("fail", mend) and "Permission denied" in found.reason


@pytest.mark.parametrize(
    "release, setting, verdict",
    [
        ("6.8.0-31-generic", "always within_size advise [never] deny force", "ok"),
        ("6.8.0-31-generic", "always within_size advise never [deny] force", "warn"),
        ("5.15.0", "always within_size [advise] never deny force", "note"),
        ("6.8.0", "nonsense", "note"),
    ],
)
def test_huge_pages(tmp_path: Path, release: str, setting: str, verdict: str) -> None:
    write(tmp_path, proc__sys__kernel__osrelease=release)
    write(tmp_path / "sys/kernel/mm/transparent_hugepage", shmem_enabled=setting)
    assert memory.huge_pages(tmp_path).verdict == verdict


def test_huge_pages_of_a_kernel_without(tmp_path: Path) -> None:
    assert memory.huge_pages(tmp_path).verdict == "note"


def test_pool(tmp_path: Path) -> None:
    write(tmp_path, proc__self__cgroup="0::/job")
    write(tmp_path / "sys/fs/cgroup/job", **{"memory.max": str(GIB)})
    assert memory.pool(tmp_path, GIB // 4).verdict == "ok"
    too_much = memory.pool(tmp_path, 2 * GIB)
    assert (too_much.verdict, too_much.mend) == ("fail", f"TENSORLINK_POOL_BYTES={GIB // 4}")
    write(tmp_path, proc__meminfo="MemTotal: 9 kB\nMemAvailable:     1024 kB")
    assert memory.pool(tmp_path, GIB // 4).verdict == "note"


# Who may get in


@pytest.mark.parametrize("token, verdict", [(None, "note"), ("secret", "warn"), (TOKEN, "ok")])
def test_token(token: str | None, verdict: str) -> None:
    found = security.token(Settings(token=token))
    assert found.verdict == verdict and (token is None or token not in f"{found}")


def certified(files: dict[str, str]) -> Settings:
    return Settings.load({**files})


def test_certificates(authority: Authority, other: Authority) -> None:
    assert security.certificates(Settings()) is None
    settings = certified(authority.issue("doctor"))
    assert settings.tls_key is not None
    os.chmod(settings.tls_key, 0o600)
    assert security.token(settings).verdict == "ok"
    assert security.certificates(settings) == Finding(
        "certificates", "ok", f"{settings.tls_cert} is accepted by its like, and its key is private"
    )
    missing = security.certificates(settings, "libssl.so.nowhere")
    assert missing is not None and missing.verdict == "fail"
    os.chmod(settings.tls_key, 0o640)
    is_open = security.certificates(settings)
    assert is_open is not None and (is_open.verdict, is_open.mend) == ("warn", f"chmod 600 {settings.tls_key}")
    strange = dataclasses.replace(settings, tls_ca=certified(other.issue("doctor")).tls_ca)
    refused = security.certificates(strange)
    assert refused is not None and refused.verdict == "fail" and "refused" in refused.reason


def test_run_time_directory(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert security.directory() == Finding(
        "run-time directory", "ok", f"{runtime_dir / 'tensorlink'}, for its user only"
    )
    (runtime_dir / "tensorlink").rmdir()
    write(runtime_dir, tensorlink="in the way")
    assert security.directory().verdict == "fail"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir / ("long" * 30)))
    monkeypatch.setattr(security, "runtime_dir", lambda: runtime_dir)  # the real one would be the user's own
    assert security.directory().verdict == "note"


def test_sockets(runtime_dir: Path) -> None:
    folder = runtime_dir / "tensorlink"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "e-1-aa.sock"))
        listener.listen()
        assert security.sockets().verdict == "ok"
    left = security.sockets()
    assert left.verdict == "note" and left.reason.startswith("1 in")


def test_container(tmp_path: Path) -> None:
    assert security.container(tmp_path, Settings()) is None
    write(tmp_path / "run", **{".containerenv": ""})
    bare, known = security.container(tmp_path, Settings()), security.container(tmp_path, Settings(token=TOKEN))
    assert bare is not None and bare.verdict == "note" and known is not None and known.verdict == "ok"


# How others reach this process


def test_address(tmp_path: Path) -> None:
    assert reach.address(tmp_path, Settings(), 1.0) is None
    loopback = reach.address(tmp_path, Settings(token=TOKEN), 1.0)
    assert loopback is not None and loopback.verdict == "note" and "127.0.0.1" in loopback.reason
    nowhere = reach.address(tmp_path, Settings(token=TOKEN, interface="nowhere0"), 1.0)
    assert nowhere is not None and nowhere.verdict == "fail" and "no network interface" in nowhere.reason


def test_address_of_an_interface(tmp_path: Path) -> None:
    name = next((name for name, found in network.interfaces().items() if found and name != "lo"), None)
    if name is None:
        pytest.skip("nothing but loopback is here")
    write(tmp_path / f"sys/class/net/{name}", mtu="9000")
    found = reach.address(tmp_path, Settings(token=TOKEN, interface=name), 1.0)
    assert found is not None and found.verdict == "ok" and f"({name}, MTU 9000)" in found.reason


def test_ports() -> None:
    assert reach.ports(Settings(token=TOKEN), 1.0) is None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        one = reach.ports(Settings(token=TOKEN, ports=f"{port}-{port}"), 1.0)
        assert one is not None and one.verdict == "fail" and one.reason.startswith("0 of")
        first = min(port, 65000)
        many = reach.ports(Settings(token=TOKEN, ports=f"{first}-{first + 500}"), 1.0)
        assert many is not None and many.verdict == "ok"


def test_coordinator_that_is_not_there() -> None:
    assert reach.coordinator(Settings(), 1.0).verdict == "note"
    silent = reach.coordinator(Settings(coordinator="127.0.0.1:1", token=TOKEN), 1.0)
    assert silent.verdict == "fail" and "127.0.0.1:1" in silent.reason
    unknown = reach.coordinator(Settings(coordinator="127.0.0.1:1"), 1.0)
    assert unknown.verdict == "fail" and "TENSORLINK_TOKEN" in str(unknown.mend)


# All together


def test_a_check_that_raises_is_a_finding() -> None:
    def broken() -> Finding | None:
        raise KeyError("this")

    assert guarded("x", broken) == [Finding("x", "note", "could not be found out: KeyError: 'this'")]


def test_worst() -> None:
    assert worst([]) == "ok"
    assert worst([Finding("a", "warn", ""), Finding("b", "fail", ""), Finding("c", "ok", "")]) == "fail"


def test_a_wrong_setting_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLINK_TIMEOUT", "soon")
    last = list(examine("b"))[-1]
    assert (last.check, last.verdict) == ("settings", "fail") and "TENSORLINK_TIMEOUT" in last.reason


def run(*arguments: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status, and the findings of the command by their checks."""
    command = [sys.executable, "-m", "tensorlink.cli", "doctor", "--json", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert not done.stderr, done.stderr
    said = json.loads(done.stdout)
    return done.returncode, {one["check"]: one for one in said["findings"]}


def test_the_command_without_a_coordinator(runtime_dir: Path) -> None:
    status, found = run("b")
    assert status == 2 and found["shared memory"]["verdict"] == "ok" and found["peer b"]["verdict"] == "fail"
    assert list((runtime_dir / "tensorlink").iterdir()) == []  # it has started none


def test_its_table() -> None:
    command = [sys.executable, "-m", "tensorlink.cli", "doctor"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TENSORLINK_TOKEN": "[bold]"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "what mends it" in done.stdout and "warn" in done.stdout, done.stdout


@pytest.mark.shm
def test_a_peer_of_this_host(join: Callable[..., Peer]) -> None:
    join("trainer")
    status, found = run("trainer")
    assert status == 0, found
    steps = ("coordinator", "join", "control of trainer", "shm to trainer")
    assert [found[step]["verdict"] for step in steps] == ["ok"] * 4
    assert "needs a token" in found["tcp to trainer"]["reason"]
    assert found["release of trainer"]["verdict"] == "ok" and "clock of trainer" not in found  # one host has one
    (absent,) = peer.reached("trainee", Settings.load(), 5.0)
    assert absent.verdict == "fail" and absent.mend == "Near names: trainer"


def test_a_peer_over_tcp(join: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLINK_TOKEN", TOKEN)
    child = join("trainer", TENSORLINK_TRANSPORTS="tcp")

    def tried(timeout: float = 5.0, **settings: Any) -> dict[str, Finding]:
        return {one.check: one for one in peer.reached("trainer", Settings.load(**settings), timeout)}

    found = tried()
    assert worst(found.values()) == "note" and TOKEN not in f"{found}"
    assert "connects to 127.0.0.1:" in found["tcp to trainer"].reason
    assert found["shm to trainer"].verdict == "note"
    assert tried(transports="^tcp")["path to trainer"].verdict == "fail"
    assert tried(token="another")["peer trainer"].verdict == "fail"
    child.signal(signal.SIGSTOP)
    silent = tried(0.5)
    child.signal(signal.SIGCONT)
    assert silent["control of trainer"].verdict == "fail" and list(silent)[-1] == "control of trainer"


def ways(name: str, timeout: float) -> list[Finding]:
    return list(peer.reached(name, Settings.load(), timeout))


def shut(host: Host, port: int) -> None:
    """A firewall: what the host would answer from that port is dropped, without a word."""
    rule = f"ip rule add pref 1 ipproto tcp sport {port} blackhole"
    subprocess.run(host.command(*rule.split()), check=True, capture_output=True)


def ports_of_peer(name: str) -> tuple[int, int]:
    """In the process of the peer: of its control channel and of its transport."""
    there = tl.current()
    (info,) = [one for one in there.peers() if one.name == name]
    return int(info.address.rpartition(":")[2]), json.loads(there._links.transports["tcp"].address())["port"]


def test_a_firewall_between_two_hosts(cluster: Cluster) -> None:
    other, here = cluster.peer(1, "b"), cluster.process(0)
    host = cluster.network.hosts[1]
    control, data = other.call(ports_of_peer, "b")
    assert worst(here.call(ways, "b", 5.0)) == "note"
    shut(host, data)
    found = {one.check: one for one in here.call(ways, "b", 1.0)}
    assert found["control of b"].verdict == "ok" and found["path to b"].verdict == "fail"
    assert found["tcp to b"].verdict == "warn" and f"tried 10.77.0.2:{data}:" in found["tcp to b"].reason
    assert "TENSORLINK_PORTS" in str(found["tcp to b"].mend)
    shut(host, control)
    *_, last = here.call(ways, "b", 1.0)
    assert (last.check, last.verdict) == ("control of b", "fail") and f"10.77.0.2:{control}" in last.reason
    other.close()
    here.close()


def test_a_port_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLINK_TOKEN", TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tl.init("a", transports="tcp") as a:
        transport = a._links.transports["tcp"]
        address = json.dumps(json.loads(transport.address()) | {"port": port}).encode()
        (me,) = a.peers()
        found = peer._path("tcp to a", transport, me, address, 1.0)
    assert found.verdict == "warn" and f"tried 127.0.0.1:{port}" in found.reason and "refused" in found.reason
    assert "TENSORLINK_PORTS" in str(found.mend)
