"""`TransportContract`: everything that `tensorlink.transports.base` promises, as tests over connected pairs."""

from __future__ import annotations

from tensorlink.testing.data import DataContract
from tensorlink.testing.ends import EndsContract


class TransportContract(DataContract, EndsContract):
    """Subclass it in a test module as `Test...`, set `transport`, and say in `make_pairs` how pairs are made."""
