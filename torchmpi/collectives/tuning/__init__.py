"""Measurement of the fastest backends."""

from .tuner import autotune

__all__ = ["autotune"]
