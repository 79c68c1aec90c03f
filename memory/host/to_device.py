"""Copies of a step's inputs from the host to the device, without waiting."""

import logging

import torch
from torch import Tensor

log = logging.getLogger(__name__)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device, contiguous; it may be used there at once.

    A copy out of pageable memory makes the host wait until the device has done all that was queued before it; one out
    of page-locked memory is queued as well. torch keeps that memory until the copy is done and uses it again, so the
    tensor may be freed at once. Where no memory can be page-locked, the copy is one that is waited for.
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    tensor = tensor.contiguous()
    try:
        tensor = tensor.pin_memory()
    except RuntimeError as error:
        log.warning("%d bytes of a batch could not be page-locked: %s", tensor.nbytes, str(error))
    return tensor.to(device, non_blocking=True)
