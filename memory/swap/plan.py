"""Swap plan: choose how many blocks to swap, and which.

A plan is made from measured bytes and seconds: each block's weights, bytes saved for backward and computing time, and
the bandwidth of the link. The seconds of a step come from simulating the slot ring's order of copies.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from ...common.text import quantity
from ..host.file_bandwidth import FileBandwidth, worth_streaming
from .block_cost import LEAST_BUDGET, BlockCost, block_seconds, saved_bytes
from .selection import evenly_spaced

GB = 2**30
PIECE_STEP = 256  # bytes; alignment of pieces, as of tensors
# An extra slot saves two copies per step, and so does an extra resident block, which is no larger. So more slots than
# these shorten a step by less than 3 % on paper, in the same memory.
MOST_PREFETCH = 3
# A plan that is slower by up to this fraction is preferred if it frees memory: less is within timing noise. On an H100
# a step of FLUX.1 with compiled selective checkpointing took 1 % longer than one without, in 13 GiB less.
ALIKE = 0.02
# Above this fraction of the free memory a plan is tight: other programs use some of it too, and a driver that spills
# into the computer's memory costs many times the time saved.
ROOMY = 0.9
# Fraction of the link's bandwidth per direction while both are in use: 38 of 52 GB/s on an H100, assumed elsewhere.
BOTH_WAYS = 38 / 52
# Assumed ratios of all blocks' computing time to their copying time if it is unknown: a quarter to four. Beyond these,
# one always waits for the other, however many blocks are prefetched.
COMPUTING = tuple(2 ** (i / 3) for i in range(-6, 7))


def prefetches(least: int) -> tuple[int, ...]:
    """List a plan's choices of prefetch if the user's prefetch_blocks is `least`."""
    return tuple(range(least, max(MOST_PREFETCH, least) + 1))


@dataclass(frozen=True)
class Hardware:
    """Hardware limits of a plan.

    free: bytes of device memory that may be used.
    link: bytes per second from the host.
    host: free bytes of RAM, not counting weights already in it.
    file: rates of the file that contains the weights; None if no weights are read from a file.
    place: location of the `free` memory, in words.
    shards: number of devices that share the swapped blocks and gather them over the link; 1 keeps them on the host.
    """

    free: int
    link: float
    host: int
    file: FileBandwidth | None = None
    place: str = "on the GPU"
    shards: int = 1


def piece_bytes(size: int, shards: int) -> int:
    """Return the bytes of each of `shards` equal pieces of a block of `size` bytes, padded."""
    return -(-size // (shards * PIECE_STEP)) * PIECE_STEP


def memory_place(device_type: str) -> str:
    """Return the location of the memory of a device of this type, in words."""
    return "on the GPU" if device_type in ("cuda", "xpu") else "in the computer's memory"


class Way(NamedTuple):
    """Way to save activations.

    checkpointing: mode, None in inference.
    budget: fraction of activations that selective checkpointing saves, else 0.
    """

    checkpointing: str | None
    budget: float


@dataclass(frozen=True)
class SearchSpace:
    """Search space of a plan.

    counts: numbers of blocks to swap.
    prefetch: numbers of blocks to prefetch.
    checkpointing: modes, () in inference.
    budgets: fractions that selective checkpointing may save.
    offload: activations saved by full checkpointing are offloaded to the host.
    """

    counts: tuple[int, ...]
    prefetch: tuple[int, ...]
    checkpointing: tuple[str, ...] = ()
    budgets: tuple[float, ...] = (0.5,)
    offload: bool = False

    @property
    def ways(self) -> list[Way]:
        """List each checkpointing mode with each budget that applies to it."""
        modes = self.checkpointing or (None,)
        return [Way(mode, budget) for mode in modes for budget in (self.budgets if mode == "selective" else (0.0,))]


@dataclass(frozen=True)
class SwapPlan:
    """Chosen plan.

    swapped: names of blocks.
    prefetch: number of blocks to prefetch.
    checkpointing: None in inference.
    budget: fraction that selective checkpointing saves, else 0.
    device_bytes: peak bytes in use.
    seconds: of one step (in inference of one pass), 0 if no block's time is known.
    fits: into the free memory.
    text: one line for the user.
    """

    swapped: frozenset[str]
    prefetch: int
    checkpointing: str | None
    budget: float
    device_bytes: int
    seconds: float
    fits: bool
    text: str

    def plain(self) -> dict[str, Any]:
        """Return the plan as plain JSON, for another device."""
        return asdict(self) | {"swapped": sorted(self.swapped)}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> "SwapPlan":
        """Make a plan from the result of `plain`."""
        return SwapPlan(**{**plain, "swapped": frozenset(plain["swapped"])})


@dataclass(frozen=True)
class _Candidate:
    """Plan to compare with others.

    swapped: names of blocks.
    prefetch: number of blocks to prefetch.
    way: checkpointing and its budget.
    device: peak bytes on the device.
    host: bytes of activations offloaded to the host.
    seconds: of one pass or step, copies that are waited for included.
    computing: seconds of computing alone, 0 if no block's time is known.
    speed: bytes per second at which the blocks are copied.
    from_file: the blocks are read from the file that contains the weights.
    """

    swapped: frozenset[str]
    prefetch: int
    way: Way
    device: int
    host: int
    seconds: float
    computing: float
    speed: float  # bytes per second at which the blocks are copied
    from_file: bool


def plan(
    blocks: Sequence[BlockCost], other_bytes: int, machine: Hardware, order: Sequence[str], choices: SearchSpace
) -> SwapPlan:
    """Choose the fastest plan that fits.

    Plans that are slower by less than `ALIKE` count as equally fast if they free memory: of those the one that swaps
    the fewest blocks, then one that is not tight, then the fastest, then the one with the least memory. If no block's
    time is known, the plan with the smallest worst-case slowdown. If none fits, the one with the least memory, with
    `fits` False.

    blocks: in the order of the forward; other_bytes: everything else on the device while the model runs.
    order: the lists of blocks in the order in which to swap them, () if all are alike.
    """
    fitting = []
    smallest: _Candidate | None = None
    for way, prefetch in product(choices.ways, choices.prefetch):
        for candidate in _candidates(blocks, other_bytes, machine, order, choices, way, prefetch):
            if smallest is None or (candidate.device, candidate.seconds) < (smallest.device, smallest.seconds):
                smallest = candidate
            if candidate.device <= machine.free and candidate.host <= machine.host:
                fitting.append(candidate)
                break  # swapping more blocks than necessary is no faster
    assert smallest is not None
    times_known = choices.checkpointing or any(block.forward for block in blocks)
    times = [c.seconds for c in fitting] if times_known else _slowdowns(blocks, fitting)
    best = _fastest(fitting, times, machine.free, bool(times_known)) or smallest
    text = _text(best, len(blocks), machine, best in fitting)
    return SwapPlan(
        swapped=best.swapped,
        prefetch=best.prefetch,
        checkpointing=best.way.checkpointing,
        budget=best.way.budget,
        device_bytes=best.device,
        seconds=best.seconds,
        fits=best in fitting,
        text=text,
    )


def _fastest(fitting: Sequence[_Candidate], times: Sequence[float], free: int, times_known: bool) -> _Candidate | None:
    """Return the best of the plans that fit, None if there are none.

    times: seconds, or worst-case multiples of the fastest's seconds.
    """
    least = min(times, default=0.0)
    # Differences of a thousandth are within measurement noise, of a hundredth within the error without measured times.
    equal, alike = least * (1.001 if times_known else 1.01), least * (1 + (ALIKE if times_known else 0.01))

    def merits(candidate: _Candidate, seconds: float) -> tuple[int, bool, bool, int, int]:
        tight = candidate.device > ROOMY * free
        return len(candidate.swapped), tight, seconds > equal and not tight, candidate.device, candidate.prefetch

    pairs = (
        (merits(c, seconds), i) for i, (c, seconds) in enumerate(zip(fitting, times, strict=True)) if seconds <= alike
    )
    return fitting[min(pairs)[1]] if fitting else None


def step_down(
    previous: SwapPlan,
    blocks: Sequence[BlockCost],
    other_bytes: int,
    machine: Hardware,
    order: Sequence[str],
    choices: SearchSpace,
) -> SwapPlan | None:
    """Choose the fastest plan with at least a tenth less memory than `previous`, which ran out of memory.

    If none fits, the one with the least memory; None if that is no smaller than `previous`.
    """
    smaller = plan(blocks, other_bytes, replace(machine, free=previous.device_bytes * 9 // 10), order, choices)
    return smaller if smaller.device_bytes < previous.device_bytes else None


def _candidates(
    blocks: Sequence[BlockCost],
    other_bytes: int,
    machine: Hardware,
    order: Sequence[str],
    choices: SearchSpace,
    way: Way,
    prefetch: int,
) -> Iterator[_Candidate]:
    """Yield a candidate for each count of blocks, fewest first."""
    names = [block.name for block in blocks]
    groups = [[n for n in names if n.rpartition(".")[0] == list_name] for list_name in order] or [names]
    computing = sum(sum(block_seconds(block, way.checkpointing, way.budget)) for block in blocks)
    offload = choices.offload and way.checkpointing == "full"
    saved = [saved_bytes(block, way.checkpointing, way.budget) for block in blocks]
    activations = _activation_bytes(blocks, saved, way.checkpointing, offload)
    for count in sorted(choices.counts):
        swapped = evenly_spaced(count, groups)
        swapped_blocks = [block for block in blocks if block.name in swapped]
        resident = sum(block.weights for block in blocks if block.name not in swapped)
        slots = _slot_bytes([block.weights for block in swapped_blocks], min(prefetch + 1, count), machine.shards)
        speed, from_file = _speed(swapped_blocks, machine, way.checkpointing)
        speed *= BOTH_WAYS if offload else 1.0
        yield _Candidate(
            swapped,
            prefetch,
            way,
            device=other_bytes + resident + slots + activations,
            host=sum(saved) if offload else 0,
            seconds=_pass_seconds(blocks, swapped, prefetch, way, speed),
            computing=computing,
            speed=speed,
            from_file=from_file,
        )


def _activation_bytes(
    blocks: Sequence[BlockCost], saved: Sequence[int], checkpointing: str | None, offload: bool
) -> int:
    """Return the bytes of activations at the peak. saved: what each block saves for backward."""
    # With offload: those of the running block, of the next one and of the two in transit to the host.
    kept_bytes = max(saved, default=0) * min(4, len(blocks)) if offload else sum(saved)
    if checkpointing in (None, "none"):
        return kept_bytes + max((block.working for block in blocks), default=0)
    # A recomputed block holds all its saved activations during its backward.
    recomputed = (block.working + max(0, block.saved - size) for block, size in zip(blocks, saved, strict=True))
    return kept_bytes + max(recomputed, default=0)


def _slot_bytes(sizes: Sequence[int], slots: int, shards: int) -> int:
    """Return the bytes of the slots, and of this device's pieces of the swapped blocks if several devices share them.

    sizes: of the swapped blocks.
    """
    if shards == 1:
        return slots * max(sizes, default=0)
    pieces = [piece_bytes(size, shards) for size in sizes]
    return slots * max(pieces, default=0) * shards + sum(pieces)


def _speed(swapped: Sequence[BlockCost], machine: Hardware, checkpointing: str | None) -> tuple[float, bool]:
    """Return the bytes per second at which these blocks reach the device, and whether they come from the file: then a
    thread reads one while the link copies another, so the slower of both counts."""
    inside, file = sum(block.in_file for block in swapped), machine.file
    if file is None or not worth_streaming(inside, sum(block.weights for block in swapped), file.room):
        return machine.link, False
    return min(machine.link, file.speed(inside, turns=checkpointing is not None)), True


def _slowdowns(blocks: Sequence[BlockCost], fitting: Sequence[_Candidate]) -> list[float]:
    """Return each plan's worst-case time as a multiple of the fastest's, if computing time is proportional to size.

    An extra slot means one resident block fewer, and evens out the copies of blocks of several sizes: the better choice
    depends on the unknown ratio of computing to copying.
    """
    worst = [1.0] * len(fitting)
    for part in COMPUTING if fitting else ():
        timed = [replace(block, forward=part * block.weights / fitting[0].speed) for block in blocks]
        seconds = [_pass_seconds(timed, c.swapped, c.prefetch, Way(None, 0.0), c.speed) for c in fitting]
        least = min(seconds)
        worst = [max(w, s / least) if least else w for w, s in zip(worst, seconds, strict=True)]
    return worst


def _pass_seconds(
    blocks: Sequence[BlockCost],
    swapped: frozenset[str],
    prefetch: int,
    way: Way,
    link: float,
) -> float:
    """Simulate the seconds of a step after the first.

    Every copy starts when it is requested (at the turn of a swapped block, for it and those ahead), all earlier
    computation is done and the link is free.
    """
    names = [block.name for block in blocks if block.name in swapped]
    number = {name: j for j, name in enumerate(names)}
    weights = {block.name: block.weights for block in blocks}
    slots = min(prefetch + 1, len(names))
    occupant: list[int | None] = [None] * slots
    copied = [0.0] * slots
    computed = link_free = step_start = 0.0

    def turn(block: BlockCost, seconds: float, direction: int) -> None:
        nonlocal computed, link_free
        if block.name in number:
            j = number[block.name]
            for ahead in range(prefetch + 1):
                other = j + direction * ahead
                if 0 <= other < len(names) and occupant[other % slots] != other:
                    occupant[other % slots] = other
                    link_free = max(link_free, computed) + weights[names[other]] / link
                    copied[other % slots] = link_free
            computed = max(computed, copied[j % slots])
        computed += seconds

    for _ in range(2):
        step_start = computed
        for block in blocks:
            turn(block, block_seconds(block, way.checkpointing, way.budget)[0], 1)
        if way.checkpointing is not None:
            for block in reversed(blocks):
                turn(block, block_seconds(block, way.checkpointing, way.budget)[1], -1)
    return computed - step_start


def _text(candidate: _Candidate, total: int, machine: Hardware, fits: bool) -> str:
    details = _swap_details(candidate, total, machine)
    if candidate.way.checkpointing is not None:
        details.append(f"checkpointing {candidate.way.checkpointing}")
    if candidate.way.budget == LEAST_BUDGET:
        details.append("saving only attention's results")
    verdict = _verdict(candidate, machine, fits)
    text = f"{verdict}: {', '.join(details)}." if details else f"{verdict}."
    if candidate.computing > 0:
        waiting = candidate.seconds - candidate.computing
        waits = f", {waiting:.2f} s of it waiting for copies" if waiting > 0.02 * candidate.seconds else ""
        text += f" About {_seconds(candidate.seconds)} s per step{waits}."
    return text


def _verdict(candidate: _Candidate, machine: Hardware, fits: bool) -> str:
    """Say whether a plan fits, and which memory lacks how much if it doesn't."""
    sizes = f"{_size(candidate.device)} of {_size(machine.free)} free"
    spare = machine.free - candidate.device
    if fits:
        return f"{'Fits' if candidate.swapped else 'Everything fits'} {machine.place} ({sizes})"
    if spare < 0:
        return f"Needs {_size(-spare)} more than is free {machine.place} ({sizes}), even with this"
    return f"Needs {_size(candidate.host)} of RAM, of which {_size(machine.host)} are free, even with this"


def _swap_details(candidate: _Candidate, total: int, machine: Hardware) -> list[str]:
    """Say how many of the blocks come from where, and how far ahead; nothing if none is swapped."""
    if not candidate.swapped:
        return []
    number, blocks = len(candidate.swapped), f"of {quantity(total, 'block')}"
    if machine.shards > 1:
        ahead = f"{candidate.prefetch} gathered ahead at {machine.link / 1e9:.1f} GB/s"
        return [f"{quantity(number, f'{blocks} is', f'{blocks} are')} shared by {machine.shards} devices", ahead]
    streams = quantity(number, f"{blocks} streams", f"{blocks} stream")
    if candidate.from_file:
        source = f"{streams} from the model file at {candidate.speed / 1e9:.1f} GB/s"
        return [source, f"{candidate.prefetch} ahead"]
    link = f" at {machine.link / 1e9:.0f} GB/s" if machine.link >= 1e9 else ""
    return [f"{streams} from RAM", f"{candidate.prefetch} ahead{link}"]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 1 else f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"


def _size(bytes_: int) -> str:
    return f"{bytes_ / GB:.1f} GB" if bytes_ >= GB // 10 else f"{bytes_ / 2**20:.1f} MB"
