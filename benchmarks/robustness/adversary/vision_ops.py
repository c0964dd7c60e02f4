"""Imported before torchvision and what imports it: its compiled operators are built for CUDA and do not load here.

No model of the adversary calls them, but torchvision describes two of them while it is imported. They are declared,
without an implementation.
"""

import torch

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
