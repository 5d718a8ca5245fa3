"""The diagnosis rules, a few a module."""
