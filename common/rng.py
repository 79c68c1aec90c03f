"""Random numbers that depend on what they are for, never on what was drawn before."""

from hashlib import blake2b

import torch


def generator(seed: int, *keys: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Make a generator for one purpose, such as `generator(seed, "noise", step, sample)`.

    The same seed and keys give the same draws in any process and in any order of calls, which is what lets a resumed
    run repeat an uninterrupted one. The global generator is neither read nor moved: ComfyUI reseeds it as it samples.
    Keys are told apart by type and place: (1, 23), (12, 3) and ("1", 23) are three streams. Of the hash, torch's CPU
    generator takes up the lower 32 bits. A GPU draws other numbers than the CPU.
    """
    digest = blake2b(digest_size=8)
    for key in (seed, *keys):
        assert isinstance(key, int | str), key
        text = f"{'i' if isinstance(key, int) else 's'}{int(key) if isinstance(key, int) else key}".encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    made = torch.Generator(device)
    made.manual_seed(int.from_bytes(digest.digest(), "little") & (2**63 - 1))
    return made
