"""Which frameworks a process needs: none for what it doesn't touch, torch only when a torch tensor comes or goes."""

from __future__ import annotations

import subprocess
import sys

import torch

from tensorlink import _core


def run(code: str) -> None:
    message = _core.pack({"w": torch.arange(3.0)})
    prelude = f"meta, payload = {message.meta!r}, {message.to_bytes()!r}\n"
    subprocess.run([sys.executable, "-c", prelude + code], check=True, timeout=120)


def test_numpy_only_processes_never_import_torch() -> None:
    run(
        "import sys\n"
        "import numpy as np\n"
        "from tensorlink import _core\n"
        "packed = _core.pack({'a': np.ones(3), 'b': bytearray(b'x')})\n"
        "_core.unpack(packed.meta, packed.to_bytes())\n"
        "_core.unpack(meta, payload, like='numpy')\n"
        "assert 'torch' not in sys.modules\n"
    )


def test_torch_is_imported_when_a_tensor_arrives() -> None:
    run(
        "import sys\n"
        "from tensorlink import _core\n"
        "got = _core.unpack(meta, payload)['w']\n"
        "import torch\n"
        "assert type(got) is torch.Tensor and got.tolist() == [0, 1, 2]\n"
    )


def test_without_torch_its_tensors_arrive_as_arrays() -> None:
    run(
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import numpy as np\n"
        "from tensorlink import _core\n"
        "got = _core.unpack(meta, payload)['w']\n"
        "assert type(got) is np.ndarray and got.dtype is np.dtype('float32') and got.tolist() == [0, 1, 2]\n"
        "try:\n"
        "    _core.unpack(meta, payload, like='torch')\n"
        "except TypeError as error:\n"
        "    assert 'torch' in str(error)\n"
        "else:\n"
        "    raise AssertionError\n"
    )
