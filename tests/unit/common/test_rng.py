import subprocess
import sys
from pathlib import Path

import torch
from tessera.common.rng import generator


def draw(*keys) -> torch.Tensor:
    return torch.randn(4, generator=generator(*keys), dtype=torch.float64)


def test_the_same_keys_give_the_same_draws():
    assert torch.equal(draw(7, "noise", 3, 5), draw(7, "noise", 3, 5))


def test_every_key_and_its_place_matter():
    keys = [(7,), (8,), (7, 0), (7, 0, 0), (7, 1, 23), (7, 12, 3), (7, 123), (7, "123"), (7, "1", 23), (-7,), (7, "a")]
    keys += [
        (7, "noise", 1, 2),
        (7, "noise", 2, 1),
        (7, "sigma", 1, 2),
        (7 + 2**32,),
        (2**80,),
        (7, "i1"),
        (7, ""),
        (7, "a", "b"),
        (7, "asb"),
    ]
    draws = {tuple(draw(*key).tolist()) for key in keys}
    assert len(draws) == len(keys)


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(1)
    state, first = torch.get_rng_state(), draw(7, "noise")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(draw(7, "noise"), first)


def test_another_process_gets_the_same_stream():
    """Python's own hash of a text differs from process to process; the one in use must not."""
    root = Path(__file__).parents[3]
    code = (
        f"import runpy; print(runpy.run_path({str(root / 'common' / 'rng.py')!r})"
        "['generator'](7, 'noise', 3).initial_seed())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(out) == generator(7, "noise", 3).initial_seed()
