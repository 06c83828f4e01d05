"""Triton kernels of the operators, for CUDA and ROCm devices; imported only where one of those is used."""
