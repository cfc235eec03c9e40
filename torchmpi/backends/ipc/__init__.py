"""Collectives of GPUs of one host through staging areas shared by CUDA IPC."""
