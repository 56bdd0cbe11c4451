"""Memory of a device."""

from __future__ import annotations

import os


def total_memory(device: str) -> int:
    """Bytes that the device has in all."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
