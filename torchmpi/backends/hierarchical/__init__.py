"""Collectives in steps over groups of ranks: over spans that the user sets, and over the hosts of a group."""

from .backend import COLLECTIVES, HierarchicalBackend
from .composition import COMPOSED, Composition, is_composed

__all__ = ["COMPOSED", "VERBS", "Composition", "HierarchicalBackend", "is_composed"]
