"""Groups of ranks, the order of their calls, and the record of the calls in flight."""
