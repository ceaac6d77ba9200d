"""Which transport takes how long for so many bytes between two memories, and why each other one is slower or can't.

Pure: values in, values out. `choose` gives a `PathReport` of all candidates between two `End`s.
"""

from tensorlink.paths.choose import EXPECTED_USES, choose
from tensorlink.paths.ends import End
from tensorlink.paths.model import Candidate, Hop
from tensorlink.paths.report import PathReport

__all__ = ["EXPECTED_USES", "Candidate", "End", "Hop", "PathReport", "choose"]
