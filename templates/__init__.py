"""Jinja templates and C++ headers of the generated kernels; data only."""
