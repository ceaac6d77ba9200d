"""A tensor from one process to another: `python examples/send_recv.py`, which starts the second process itself.

Or start the two by hand, in two shells, in either order: `... send_recv.py sender` and `... send_recv.py receiver`.
"""

import subprocess
import sys

import numpy as np

import tensorlink as tl


def sender() -> None:
    with tl.init("sender"):
        tl.send({"step": 7, "weights": np.arange(1_000_000, dtype=np.float32)}, to="receiver")
        print("sender:   4 MB sent;", tl.recv("receiver"))


def receiver() -> None:
    with tl.init("receiver"):
        message = tl.recv("sender")  # a view of shared memory: the bytes were not copied on this side
        print("receiver: step", message["step"], "with a sum of", message["weights"].sum(dtype=np.float64))
        tl.send("thank you", to="sender")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        {"sender": sender, "receiver": receiver}[sys.argv[1]]()
    else:
        with subprocess.Popen([sys.executable, __file__, "sender"]) as other:
            receiver()
        sys.exit(other.returncode)
