"""The tests; helpers are in `helpers_log.py`, `loops.py`, `casing.py`."""
