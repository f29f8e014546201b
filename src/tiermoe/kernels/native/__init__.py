"""The native kernels on tensors: one module for each of them."""
