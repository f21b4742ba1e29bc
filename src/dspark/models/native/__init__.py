"""C kernels of the int8 path, compiled on first use; kernels.c says what and why."""
