"""The errors ampscope raises. A message says what, which path or name, and what to do."""


class AmpscopeError(Exception):
    """Base of every error ampscope raises."""


class LogError(AmpscopeError):
    """A log folder or file that cannot be used: missing, damaged beyond reading, newer, or written by another process."""
