"""Residency of a run's frozen weights, registered as a model that ComfyUI's memory management can unload."""

from collections.abc import Sequence
from typing import Protocol

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ...common.core import loaded_models
from .frozen import unload


class FrozenModule(nn.Module):
    """Holds frozen weights in buffers that can be freed and read again."""

    def take(self) -> None:
        """Read the weights onto the device."""
        raise AssertionError(f"{type(self).__name__} has no take")

    def release(self, last: bool = False) -> None:
        """Free the weights; the buffers keep their names. last: they will not be read again."""
        for name in self._buffers:
            self._buffers[name] = None

    def repoint(self, name: str, source: Tensor, target: Tensor) -> bool | None:
        """Record that the host copy of the buffer `name` has moved from `source` to `target`.

        Returns True if the MODEL has a separate weight of its own, because this one is patched or cast.
        """

    def end(self) -> None:
        """Restore the MODEL's original state, after the last `release`."""

    def held_bytes(self) -> int:
        return sum(b.numel() * b.element_size() for b in self._buffers.values() if b is not None)


class Holder(Protocol):
    """Holds weights on the device: a module, or the slots of swapped blocks."""

    def take(self) -> None: ...

    def release(self, last: bool = False) -> None: ...

    def end(self) -> None: ...

    def held_bytes(self) -> int: ...


class ResidentWeights(ModelPatcher):
    """Registers the modules' weights with ComfyUI while they are on the device.

    When ComfyUI needs the memory it unloads them like any model; `ensure` reloads them before the next step. They are
    loaded and unloaded together: a training step needs all of them.
    """

    def __init__(self, modules: Sequence[Holder], load_device: torch.device, offload_device: torch.device):
        self.modules = modules
        self.bytes = sum(module.held_bytes() for module in modules)
        self.resident, self.is_last = True, False
        super().__init__(nn.Module(), load_device, offload_device, size=max(self.bytes, 1))

    def ensure(self) -> None:
        """Make the weights resident and known to ComfyUI."""
        if not self.resident:
            # The memory may be taken by the MODEL itself, whose modules hold patched weights while it is loaded.
            unload()
        if not self.resident or not any(entry.model is self for entry in loaded_models()):
            comfy.model_management.load_models_gpu([self], force_full_load=True)

    def release(self) -> None:
        """Take the weights off the device and out of ComfyUI's list."""
        self.is_last = True
        loaded = loaded_models()
        for entry in [entry for entry in loaded if entry.model is self]:
            loaded.remove(entry)
            entry.model_unload()
        self._set_resident(False)
        for module in self.modules:
            module.end()

    def clear(self) -> None:
        """Release the weights, and the references to those on the host."""
        self.release()
        self.modules = ()

    def _set_resident(self, resident: bool) -> int:
        if resident == self.resident:
            return 0
        try:
            for module in self.modules:
                module.take() if resident else module.release(self.is_last)
        except BaseException:
            for module in self.modules:
                module.release()
            raise
        self.resident = resident
        return self.bytes

    # Called by ComfyUI's memory management.

    def model_size(self) -> int:
        return self.size

    def loaded_size(self) -> int:
        return self.size if self.resident else 0

    def current_loaded_device(self) -> torch.device:
        return self.load_device if self.resident else self.offload_device

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False) -> int:
        return self._set_resident(True)

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False) -> int:
        return self._set_resident(False)

    def detach(self, unpatch_all=True) -> nn.Module:
        self._set_resident(False)
        return self.model
