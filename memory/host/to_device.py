"""Non-blocking copies of a step's inputs from the host to the device."""

import logging

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device, contiguous; it may be used there at once.

    A copy from pageable memory blocks the host until the device has done all earlier queued work; one from page-locked
    memory is only queued. torch keeps that memory until the copy is done and then reuses it, so the tensor may be freed
    at once. If no memory can be page-locked, the copy blocks.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    tensor = tensor.contiguous()
    try:
        tensor = tensor.pin_memory()
    except RuntimeError as error:
        log.warning("%d bytes of a batch could not be page-locked: %s", tensor.nbytes, str(error))
    return tensor.to(device, non_blocking=True)
