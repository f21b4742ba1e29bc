"""Kernels in C for the int8 path on a CPU, compiled on first use; see kernels.c for what and why."""
