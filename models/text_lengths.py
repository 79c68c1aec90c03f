"""The few lengths that captions of any length are padded to, where a model masks its pads exactly."""

LADDER = (128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)


def padded_length(length: int) -> int:
    """The step of the ladder that holds `length` tokens; beyond it whole thousands (1024)."""
    assert length >= 1, length
    return next((step for step in LADDER if step >= length), -(-length // 1024) * 1024)
