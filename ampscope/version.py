"""The version of ampscope: what `pyproject.toml` builds and what a log says it was written by."""

VERSION = "0.1.0"
