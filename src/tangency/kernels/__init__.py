"""Kernels: what they promise, those of finite networks, and kernels made of kernels."""

from .._base.on_demand import import_on_demand

import_on_demand(__name__)
