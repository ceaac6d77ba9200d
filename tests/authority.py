"""Certificates for tests, by the command `openssl`: good ones, and each kind that must be refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class Authority:
    """A CA in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca = folder / "ca.pem"
        openssl("req", "-x509", *KEY, "-days", "2", "-subj", "/CN=tests", "-keyout", folder / "ca.key", "-out", self.ca)

    def issue(self, who: str, *, name: str = "tensorlink", days: int = 2, more: str = "") -> dict[str, str]:
        """The environment of a process with a certificate for that DNS name; `more` are extensions of it."""
        key, request, cert = (self._folder / f"{who}.{kind}" for kind in ("key", "csr", "pem"))
        extensions = ["-addext", f"subjectAltName=DNS:{name}", *(["-addext", more] if more else [])]
        openssl("req", *KEY, "-subj", f"/CN={who}", *extensions, "-keyout", key, "-out", request)
        signer = ("-CA", self.ca, "-CAkey", self._folder / "ca.key", "-CAcreateserial")
        openssl("x509", "-req", "-in", request, *signer, "-copy_extensions", "copy", "-days", str(days), "-out", cert)
        return {"TENSORLINK_TLS_CERT": str(cert), "TENSORLINK_TLS_KEY": str(key), "TENSORLINK_TLS_CA": str(self.ca)}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Another CA, which nobody here believes."""
    return Authority(tmp_path_factory.mktemp("other"))
