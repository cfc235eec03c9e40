"""Data transport: one file or folder for each backend, and the choice between them."""
