"""Measurement of the fastest backends."""

from .run import autotune

__all__ = ["autotune"]
