"""Triton kernels of the decoder layers; imported only where Triton and a CUDA device (or its interpreter) exist."""
