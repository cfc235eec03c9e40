"""From functions in Python to machine code kept on disk: Numba with types of its own, LLVM, object files."""
