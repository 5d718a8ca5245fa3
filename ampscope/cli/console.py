"""What the commands share: a console, and text from a log made safe to print."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def console(stderr: bool = False) -> Console:
    """Return a console: colour on a terminal, plain and 80 columns wide where output is piped (COLUMNS overrides)."""
    return Console(stderr=stderr, highlight=False, emoji=False, markup=False, soft_wrap=False)


def clean(text: str) -> str:
    """Return text from a log without control characters (terminal escapes among them), so that it can only be read."""
    return "".join(c if c.isprintable() else "�" for c in text)


def shown(text: str, style: str = "") -> Text:
    """Return text from a log as `rich` text: cleaned, and never read as markup."""
    return Text(clean(text), style=style)
