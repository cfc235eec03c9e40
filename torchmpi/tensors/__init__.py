"""Tensors: dtypes, memory, streams, and lists of them. Nothing here knows of ranks."""
