"""Loops that begin again on the remaining ranks after a loss; what `elastic()` and others share."""
