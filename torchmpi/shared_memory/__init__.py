"""Memory that the ranks of one host share, and the compiled code that accesses this memory."""
