"""Kernels: products, experts, attention, norms, routers. Native on a CPU, Triton's on a GPU; torch is the reference."""
