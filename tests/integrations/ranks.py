"""What the ranks of tests/integrations/test_torchrun.py run: `python -m tests.integrations.ranks DO FOLDER`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tensorlink as tl

RANK = int(os.environ["RANK"])
OTHER = f"rank{1 - RANK}"


def meet(folder: Path) -> None:
    """Exchanges tensors, here and by a process group that is made after it and used to the end."""
    me = tl.init()
    assert tl.init() is me
    dist.init_process_group("gloo")
    tl.send(torch.full((4,), RANK), OTHER)
    got = tl.recv(OTHER)
    tl.shutdown()
    total = torch.ones(1)
    dist.all_reduce(total)
    tell(folder, {"me": me.name, "got": got.tolist(), "total": total.item(), "coordinator": me.settings.coordinator})
    dist.destroy_process_group()


def meet_after(folder: Path) -> None:
    """The same where the process group was there first."""
    dist.init_process_group("gloo")
    tl.init()
    tl.send(torch.full((4,), RANK), OTHER)
    got = tl.recv(OTHER)
    total = torch.ones(1)
    dist.all_reduce(total)
    tell(folder, {"me": tl.current().name, "got": got.tolist(), "total": total.item()})
    dist.destroy_process_group()
    tl.shutdown()


def restart(folder: Path) -> None:
    """The first start puts a tensor and is killed; the second reads what the first had put, and goes on."""
    me = tl.init()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        ref = tl.put(torch.arange(100_000))
        (folder / f"ref{RANK}").write_bytes(ref.to_bytes())
        (folder / f"first{RANK}").write_text(str(me.id.incarnation))
        tl.send("ready", OTHER)
        tl.recv(OTHER)
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        tl.recv(OTHER, timeout=None)  # ends with this process at the latest
    tl.send(torch.full((4,), RANK), OTHER)
    got = tl.recv(OTHER)
    try:
        tl.get(tl.TensorRef.from_bytes((folder / f"ref{1 - RANK}").read_bytes()), timeout=10)
        failed = ""
    except tl.TensorLinkError as error:
        failed = type(error).__name__
    first = int((folder / f"first{RANK}").read_text())
    tell(folder, {"got": got.tolist(), "failed": failed, "later": me.id.incarnation > first})
    tl.send("done", OTHER)
    tl.recv(OTHER)


def tell(folder: Path, what: dict[str, object]) -> None:
    (folder / f"rank{RANK}.json").write_text(json.dumps(what))


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
