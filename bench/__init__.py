"""Measurements against others, side by side in one run. `python -m pytest bench`, then `python -m bench.report`."""
