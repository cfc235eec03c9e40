"""Collectives in steps over groups of ranks: over spans that the user sets, and over the hosts of a group."""

from .spans import COMPOSED, Composition, is_composed
from .two_level import VERBS, HierarchicalBackend

__all__ = ["COMPOSED", "VERBS", "Composition", "HierarchicalBackend", "is_composed"]
