"""Kernels: what they promise, those of finite networks, and kernels made of kernels."""
