"""A GPU's kernels on packed weights, in Triton."""
