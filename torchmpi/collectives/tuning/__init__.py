"""Measuring which transport is the fastest, and keeping the result."""

from .run import autotune

__all__ = ["autotune"]
