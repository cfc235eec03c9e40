"""Collectives in steps on groups of ranks: over the levels of a span, and over the hosts of a group."""

from .hierarchical_backend import COLLECTIVES, HierarchicalBackend
from .host_comparison import comparison_for
from .spans import COMPOSED, SpanCollective, is_composed
from .steps import StepRunner

__all__ = [
    "COLLECTIVES",
    "COMPOSED",
    "HierarchicalBackend",
    "SpanCollective",
    "StepRunner",
    "comparison_for",
    "is_composed",
]
