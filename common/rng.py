"""Random numbers that depend on their purpose, never on earlier draws."""

from hashlib import blake2b

import torch


def generator(seed: int, *keys: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Make a generator for one purpose, such as `generator(seed, "noise", step, sample)`.

    The same seed and keys give the same draws in any process and in any order of calls, so that a resumed
    run repeats an uninterrupted one. The global generator is neither read nor advanced: ComfyUI reseeds it to sample.
    Keys differ by type and position: (1, 23), (12, 3) and ("1", 23) are three streams. torch's CPU generator uses the
    lower 32 bits of the hash. A GPU draws other numbers than the CPU.
    """
    digest = blake2b(digest_size=8)
    for key in (seed, *keys):
        assert isinstance(key, int | str), key
        text = f"{'i' if isinstance(key, int) else 's'}{int(key) if isinstance(key, int) else key}".encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    rng = torch.Generator(device)
    rng.manual_seed(int.from_bytes(digest.digest(), "little") & (2**63 - 1))
    return rng
