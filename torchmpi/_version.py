"""The version, alone in a file so that packaging can read it without importing torch."""

from __future__ import annotations

import subprocess
from pathlib import Path

__version__ = "0.1.0"


def commit() -> str:
    """Return the commit that this package was built from, or that its checkout is at; "" if neither is known."""
    built_in = Path(__file__).with_name("_commit.txt")  # written by setup.py
    if built_in.exists():
        return built_in.read_text().strip()
    checkout = Path(__file__).parent.parent
    if not (checkout / ".git").exists():
        return ""
    describe = ("git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    try:
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or a checkout of another user
        return ""
