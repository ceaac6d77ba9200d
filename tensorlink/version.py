"""The release, as `pyproject.toml` has it."""

RELEASE = "0.1.0"
