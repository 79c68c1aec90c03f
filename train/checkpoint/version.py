"""The pack's version, as `pyproject.toml` names it."""

VERSION = "0.1.0"
