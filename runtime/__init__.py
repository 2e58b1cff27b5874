"""Compilation, launch, caching, autograd and verification of generated kernels."""
