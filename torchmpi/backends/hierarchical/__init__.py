"""Collectives in steps on groups of ranks: over the levels of a span, and over the hosts of a group."""
