"""Tensors: dtypes, memory, streams, and lists of them. This package does not depend on ranks."""
