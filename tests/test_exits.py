"""Ways for a process to end, or to go on after a part of it has ended: none hangs, crashes or says a word of ours."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import make_runtime_dir
from tests.peer import ROOT

DEADLINE_S = 60.0

PRELUDE = """
import asyncio, atexit, gc, multiprocessing, os, signal, subprocess, sys, threading, time
import numpy as np
import tensorlink as tl

REMOTE = {"transports": "tcp", "token": "a secret of the tests"}


def transfers_in_flight():
    "One of each kind, none of which will end by itself in time."
    b = tl.init("b", max_bytes_per_s=1 << 20, **REMOTE)
    a = tl.init("a", timeout=30, **REMOTE)  # it ends first, and lets go of what it reads
    big = b.put(np.ones(64 << 20, np.uint8))
    out = np.zeros(64 << 20, np.uint8)
    subscriber = tl.WeightSubscriber("nothing", {"w": np.zeros(8)}, endpoint=a)
    begun = [
        a.isend(np.ones(1 << 20), "nobody"),
        a.iget(big),
        a.iget(big, out=out),
        a.irecv("b", tag="never"),
        a.irecv(tag="never"),
        subscriber.ipull(timeout=None),
    ]
    while b.stats()["served_bytes"] == 0:
        time.sleep(0.001)
    return a, b, begun


def on_threads(*calls):
    "Daemon threads that call again and again, whatever it raises; returns when each has begun."
    def run(call, ready):
        while True:
            ready.set()
            try:
                call()
            except tl.TensorLinkError:
                pass
    events = []
    for call in calls:
        events.append(threading.Event())
        threading.Thread(target=run, args=(call, events[-1]), daemon=True).start()
    for event in events:
        event.wait()
"""


@dataclass(frozen=True)
class Script:
    body: str
    code: int = 0
    stderr: str = ""
    """How the last line of it starts; nothing: there is none at all."""


SCRIPTS = {
    "end with transfers in flight": Script("kept = transfers_in_flight()"),
    "exit with transfers in flight": Script("kept = transfers_in_flight(); sys.exit(3)", 3),
    "_exit with transfers in flight": Script("kept = transfers_in_flight(); os._exit(7)", 7),
    "exec with transfers in flight": Script(
        """
        kept = transfers_in_flight()
        os.execv(sys.executable, [sys.executable, "-c", "raise SystemExit(5)"])
        """,
        5,
    ),
    "an exception that nobody catches": Script(
        "kept = transfers_in_flight(); raise ValueError('mine')", 1, "ValueError: mine"
    ),
    "an exception in a with block": Script(
        "with tl.init('a') as a: a.irecv(tag='never'); raise ValueError('mine')", 1, "ValueError: mine"
    ),
    "SIGTERM": Script(
        "kept = transfers_in_flight(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", -signal.SIGTERM
    ),
    "SIGTERM that exits": Script(
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
        a, b, begun = transfers_in_flight()
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        a.recv(tag="never", timeout=None)
        """,
        4,
    ),
    "SIGTERM that shuts down": Script(
        """
        signal.signal(signal.SIGTERM, lambda *_: a.shutdown())
        a, b, begun = transfers_in_flight()
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        try:
            a.recv(tag="never", timeout=None)
        except tl.ClosedError:
            sys.exit(6)
        """,
        6,
    ),
    "Ctrl-C in a receive": Script(
        """
        tl.init("a")
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        tl.recv(tag="never", timeout=None)
        """,
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
    "Ctrl-C in a wait for somebody who never joins": Script(
        """
        tl.init("a")
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            tl.isend(1, "nobody").wait()
        except KeyboardInterrupt:
            pass
        """
    ),
    "daemon threads in every call": Script(
        """
        a, b = tl.init("a"), tl.init("b")
        ref = b.put(np.ones(1 << 20, np.uint8))
        small = b.put(np.ones(10, np.uint8))
        out = np.zeros(1 << 20, np.uint8)
        on_threads(
            lambda: a.recv(tag="never", timeout=None),
            lambda: a.recv("b", timeout=None),
            lambda: b.send(np.ones(100_000), "a", tag="x"),
            lambda: a.recv(tag="x"),
            lambda: a.get(ref),
            lambda: a.get(small),
            lambda: a.get(ref, out=out),
            lambda: a.put(out).release(),
            lambda: a.irecv(tag="never").wait(),
            lambda: a.send(1, "nobody"),
            lambda: tl.wait([a.irecv(tag="never")], timeout=None),
            lambda: tl.WeightSubscriber("w", {"w": out}, endpoint=a).pull(timeout=None),
        )
        time.sleep(0.2)
        """
    ),
    "daemon threads that are remote": Script(
        """
        a, b = tl.init("a", **REMOTE), tl.init("b", **REMOTE)
        ref = b.put(np.ones(8 << 20, np.uint8))
        out = np.zeros(8 << 20, np.uint8)
        on_threads(
            lambda: a.recv("b", timeout=None),
            lambda: b.send(np.ones(100_000), "a", tag="x"),
            lambda: a.recv(tag="x"),
            lambda: a.get(ref),
            lambda: a.get(ref, out=out),
        )
        time.sleep(0.2)
        """
    ),
    "a thread that shuts down at the same time": Script(
        """
        a, b, begun = transfers_in_flight()
        threading.Thread(target=a.shutdown).start()
        threading.Thread(target=b.shutdown, daemon=True).start()
        """
    ),
    "a hook that exits and one that never ends": Script(
        """
        a = tl.init("a")
        a.on("peer_up", lambda _: sys.exit(1))
        entered = threading.Event()
        a.on("peer_up", lambda _: (entered.set(), time.sleep(60)))
        b = tl.init("b")
        assert entered.wait(10)
        """,
        0,
        "SystemExit: 1",
    ),
    "callbacks at exit, of before and after": Script(
        """
        def early():  # runs last
            try:
                tl.send(1, "a")
            except tl.ClosedError:
                os._exit(8)
        atexit.register(early)
        a = tl.init("a")
        atexit.register(a.drain)
        atexit.register(lambda: a.put(np.ones(100_000)))
        """,
        8,
    ),
    "views and endpoints in cycles and globals": Script(
        """
        a, b = tl.init("a"), tl.init("b")
        view = a.get(b.put(np.ones(1 << 20, np.uint8)))
        memory = a.empty(1000, np.float32, like="numpy")
        class Cycle: pass
        cycle = Cycle(); cycle.self = cycle; cycle.view = view; cycle.endpoint = a; cycle.pending = a.irecv(tag="never")
        sys.modules["kept_to_the_end"] = cycle
        del cycle
        """
    ),
    "coroutines that wait": Script(
        """
        a = tl.init("a")
        async def main():
            waiting = [asyncio.create_task(_wait(a.irecv(tag=str(i)))) for i in range(3)]
            await asyncio.sleep(0.05)
        async def _wait(transfer):
            await transfer
        asyncio.run(main())
        """
    ),
    "a loop that was closed under its waits": Script(
        """
        a = tl.init("a")
        loop = asyncio.new_event_loop()
        async def wait():
            await a.irecv(tag="x")
        task = loop.create_task(wait())
        loop.call_later(0.05, loop.stop)
        loop.run_forever()
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()
        """
    ),
    "forked children that end in all ways": Script(
        """
        a, b, begun = transfers_in_flight()
        def child(end):
            pid = os.fork()
            if pid == 0:
                try:
                    tl.recv(tag="x")
                except tl.ClosedError:
                    end()
                os._exit(99)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        def all_of_exit():
            atexit._run_exitfuncs()
            del globals()["begun"][:]
            gc.collect()
            os._exit(0)
        assert child(lambda: os._exit(0)) == 0
        assert child(all_of_exit) == 0
        assert child(lambda: os.kill(os.getpid(), signal.SIGTERM)) == -signal.SIGTERM
        assert child(lambda: os.execv(sys.executable, [sys.executable, "-c", "raise SystemExit(5)"])) == 5
        c = tl.init("c", **REMOTE)
        a.send("go on", "c")
        assert c.recv("a") == "go on"
        """
    ),
    "a forked child that exits as a program does": Script(
        """
        kept = transfers_in_flight()
        pid = os.fork()
        if pid:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        """
    ),
    "processes of multiprocessing": Script(
        """
        def forked():
            try:
                tl.send(1, "a")
            except tl.ClosedError:
                return
            raise SystemExit(1)
        def spawned():
            with tl.init("child") as child:
                child.send(np.ones(100_000), "a")
        if __name__ == "__main__":
            a = tl.init("a")
            for method, target in (("fork", forked), ("spawn", spawned), ("forkserver", spawned)):
                process = multiprocessing.get_context(method).Process(target=target)
                process.start()
                if method != "fork":
                    assert a.recv().sum() == 100_000
                process.join(30)
                assert process.exitcode == 0, method
        """
    ),
    "fork in a thread while others are at work": Script(
        """
        a, b = tl.init("a"), tl.init("b")
        on_threads(
            lambda: b.send(np.ones(100_000), "a", tag="x"),
            lambda: a.recv(tag="x"),
            lambda: a.recv(tag="never", timeout=None),
        )
        for _ in range(20):
            pid = os.fork()
            if pid == 0:
                try:
                    a.send(1, "b")
                except tl.ClosedError:
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(pid, 0)[1] == 0
        """
    ),
    "an endpoint that is dropped without a word": Script(
        """
        tl.init("a")
        endpoint = tl.init("b")
        del endpoint
        gc.collect()
        """
    ),
    "a failed init": Script(
        """
        a = tl.init("a")
        try:
            tl.init("a")
        except tl.NameInUseError:
            pass
        """
    ),
}

NESTED = """
def descriptors():
    return len(os.listdir("/proc/self/fd")), threading.active_count()


for turn in range({count}):
    with tl.init("a") as a:
        with tl.init("b") as b:
            a.send(turn, "b")
            assert b.recv("a") == turn
        tl.shutdown()
        tl.shutdown()
    if turn == 4:
        gc.collect()
        before = descriptors()
deadline = time.monotonic() + 10
gc.collect()
while (now := descriptors()) > before and time.monotonic() < deadline:
    time.sleep(0.05)
assert now <= before, (before, now)
"""


Done = subprocess.CompletedProcess[str]


def end_of(script: Script, folder: Path, timeout: float = DEADLINE_S, **variables: str) -> Done:
    path = folder / "script.py"
    path.write_text(PRELUDE + textwrap.dedent(script.body))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDEVMODE": "0", **variables}
    return subprocess.run(
        [sys.executable, str(path)], env=environment, timeout=timeout, capture_output=True, text=True, check=False
    )


def run(script: Script, folder: Path, timeout: float = DEADLINE_S) -> None:
    check(script, end_of(script, folder, timeout))


def check(script: Script, done: Done) -> None:
    assert done.returncode == script.code, done.stderr
    if script.stderr:
        assert done.stderr.strip().splitlines()[-1].startswith(script.stderr)
        assert done.stderr.count("Traceback") == 1, done.stderr
    else:
        assert done.stderr == ""
    assert done.stdout == ""


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Done]]]:
    """The end of each script that is wanted. They run side by side, one on each processor: most of the time they wait."""
    items = [item for item in request.session.items if getattr(item, "originalname", "") == "test_it_ends_quietly"]
    folders: dict[str, Path] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for item in items:
            folders[item.callspec.params["name"]] = make_runtime_dir()  # type: ignore[attr-defined]
        yield {
            name: pool.submit(end_of, SCRIPTS[name], folder, XDG_RUNTIME_DIR=str(folder))
            for name, folder in folders.items()
        }
        pool.shutdown(cancel_futures=True)
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("name", list(SCRIPTS))
def test_it_ends_quietly(ends: dict[str, Future[Done]], name: str) -> None:
    check(SCRIPTS[name], ends[name].result())


def test_init_and_shutdown_again_and_again(tmp_path: Path) -> None:
    run(Script(NESTED.format(count=20)), tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_init_and_shutdown_a_thousand_times(tmp_path: Path) -> None:
    run(Script(NESTED.format(count=1000)), tmp_path, 850)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [name for name in SCRIPTS if "daemon" in name])
def test_it_ends_quietly_each_time(name: str, tmp_path: Path) -> None:
    for _ in range(25):
        run(SCRIPTS[name], tmp_path)
