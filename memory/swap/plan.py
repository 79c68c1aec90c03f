"""Swap plan: the number of blocks to swap, and which.

A plan is made from bytes and seconds that were measured: what each block weighs, saves for backward and takes to
compute, and the bandwidth of the link. The seconds of a step come from simulating the slot ring's order of copies.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from ..host.file_bandwidth import FileBandwidth, worth_streaming
from .block_cost import LEAST_BUDGET, BlockCost, block_seconds, saved_bytes
from .selection import evenly_spaced

GB = 2**30
PIECE_STEP = 256  # bytes; pieces begin where tensors may
# A slot more saves two copies a step, as a block does that stays, which is no larger. So more slots than these shorten
# a step by less than 3 % on paper, in the same memory.
MOST_PREFETCH = 3
# A plan that is slower by up to this part is taken where it buys room: less is within what timing differs by. On an
# H100 a step of FLUX.1 with compiled selective checkpointing took 1 % more than one without, in 13 GiB less.
ALIKE = 0.02
# Above this part of the free memory a plan is tight: other programs take some of it too, and a driver that spills into
# the computer's memory costs many times what was saved.
ROOMY = 0.9
# Part of the link that either direction has while both carry something: 38 of 52 GB/s on an H100, assumed elsewhere.
BOTH_WAYS = 38 / 52
# How long all blocks compute, as a part of what copying them all takes, where that is not known: a quarter to four
# times as long. Outside of that either always waits for the other, however many blocks are copied ahead.
COMPUTING = tuple(2 ** (i / 3) for i in range(-6, 7))


def prefetches(least: int) -> tuple[int, ...]:
    """List the choices of a plan where the user's prefetch_blocks is `least`."""
    return tuple(range(least, max(MOST_PREFETCH, least) + 1))


@dataclass(frozen=True)
class Hardware:
    """Budget of a plan.

    free: bytes of device memory that may be used; link: bytes per second from the host.
    host: free bytes there, in which weights already have their place; file: rates of the file that weights lie in.
    place: what holds `free`, in words.
    shards: devices that share the swapped blocks and gather them by the link; 1 has them on the host.
    """

    free: int
    link: float
    host: int
    file: FileBandwidth | None = None
    place: str = "on the GPU"
    shards: int = 1


def piece_bytes(size: int, shards: int) -> int:
    """Bytes that each of so many devices keeps of a block of `size` bytes, which is filled up to equal pieces."""
    return -(-size // (shards * PIECE_STEP)) * PIECE_STEP


def memory_place(device_type: str) -> str:
    """Return where a device of this type has its memory, in words."""
    return "on the GPU" if device_type in ("cuda", "xpu") else "in the computer's memory"


class Way(NamedTuple):
    """Checkpointing, None in inference, and the part of the activations that selective checkpointing saves, else 0."""

    checkpointing: str | None
    budget: float


@dataclass(frozen=True)
class SearchSpace:
    """Choices of a plan.

    counts, prefetch: numbers of blocks to swap, and to copy ahead.
    checkpointing: modes, () in inference; budgets: parts that selective checkpointing may save.
    offload: what full checkpointing saves goes to the host.
    """

    counts: tuple[int, ...]
    prefetch: tuple[int, ...]
    checkpointing: tuple[str, ...] = ()
    budgets: tuple[float, ...] = (0.5,)
    offload: bool = False

    @property
    def ways(self) -> list[Way]:
        """List each checkpointing with each budget that it reads."""
        modes = self.checkpointing or (None,)
        return [Way(mode, budget) for mode in modes for budget in (self.budgets if mode == "selective" else (0.0,))]


@dataclass(frozen=True)
class SwapPlan:
    """Chosen plan.

    swapped: names of blocks.
    checkpointing: None in inference.
    budget: part that selective checkpointing saves, else 0.
    device_bytes: at most in use.
    seconds: of one step (in inference of one pass), 0 where no block's time is known.
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
    def of(plain: Mapping[str, Any]) -> "SwapPlan":
        """Make the plan that `plain` has told of."""
        return SwapPlan(**{**plain, "swapped": frozenset(plain["swapped"])})


@dataclass(frozen=True)
class _Candidate:
    swapped: frozenset[str]
    prefetch: int
    way: Way
    device: int
    host: int
    seconds: float
    computing: float
    speed: float  # bytes per second at which the blocks come
    from_file: bool


def plan(
    blocks: Sequence[BlockCost], other_bytes: int, machine: Hardware, order: Sequence[str], choices: SearchSpace
) -> SwapPlan:
    """Choose the fastest plan that fits.

    Plans that are slower by less than `ALIKE` count as equally fast where they buy room: of those the one that swaps
    least, then one that is not tight, then the fastest, then the one that takes least memory. Where no block's time is
    known, the one that is least behind the fastest at worst. Where none fits, the one that takes least, with `fits`
    False.

    blocks: in the order of the forward; other_bytes: everything else that lies on the device while the model runs.
    order: the lists of blocks in the order in which they are to be used, () where all are alike.
    """
    fitting = []
    smallest: _Candidate | None = None
    for way, prefetch in product(choices.ways, choices.prefetch):
        for candidate in _candidates(blocks, other_bytes, machine, order, choices, way, prefetch):
            if smallest is None or (candidate.device, candidate.seconds) < (smallest.device, smallest.seconds):
                smallest = candidate
            if candidate.device <= machine.free and candidate.host <= machine.host:
                fitting.append(candidate)
                break  # what swaps more than it has to is no faster
    assert smallest is not None
    known = choices.checkpointing or any(block.forward for block in blocks)
    behind = [c.seconds for c in fitting] if known else _slowdowns(blocks, fitting)
    best = _fastest(fitting, behind, machine.free, bool(known)) or smallest
    text = _text(best, len(blocks), machine, best in fitting)
    return SwapPlan(best.swapped, best.prefetch, *best.way, best.device, best.seconds, best in fitting, text)


def _fastest(fitting: Sequence[_Candidate], behind: Sequence[float], free: int, known: bool) -> _Candidate | None:
    """Return the plan to take of those that fit, None of none. behind: seconds, or times the fastest's at worst."""
    least = min(behind, default=0.0)
    # Differences of a thousandth are below what was measured, those of a hundredth below what can be reckoned without.
    equal, alike = least * (1.001 if known else 1.01), least * (1 + (ALIKE if known else 0.01))

    def merits(candidate: _Candidate, seconds: float) -> tuple[int, bool, bool, int, int]:
        tight = candidate.device > ROOMY * free
        return len(candidate.swapped), tight, seconds > equal and not tight, candidate.device, candidate.prefetch

    pairs = ((merits(c, much), i) for i, (c, much) in enumerate(zip(fitting, behind, strict=True)) if much <= alike)
    return fitting[min(pairs)[1]] if fitting else None


def step_down(
    made: SwapPlan,
    blocks: Sequence[BlockCost],
    other_bytes: int,
    machine: Hardware,
    order: Sequence[str],
    choices: SearchSpace,
) -> SwapPlan | None:
    """Choose the fastest plan that takes at least a tenth less than `made`, whose memory did not suffice.
    Else the one that takes least; None where `made` was that one.
    """
    less = plan(blocks, other_bytes, replace(machine, free=made.device_bytes * 9 // 10), order, choices)
    return less if less.device_bytes < made.device_bytes else None


def _candidates(
    blocks: Sequence[BlockCost],
    other_bytes: int,
    machine: Hardware,
    order: Sequence[str],
    choices: SearchSpace,
    way: Way,
    prefetch: int,
) -> Iterator[_Candidate]:
    """One for each count of blocks, fewest first."""
    names = [block.name for block in blocks]
    groups = [[n for n in names if n.rpartition(".")[0] == wanted] for wanted in order] or [names]
    computing = sum(sum(block_seconds(block, *way)) for block in blocks)
    offload = choices.offload and way.checkpointing == "full"
    kept = [saved_bytes(block, *way) for block in blocks]
    # With offload those of the block that runs, of the next one and of the two that are on their way out.
    activations = max(kept, default=0) * min(4, len(blocks)) if offload else sum(kept)
    # A block that is computed again holds all that it saves while it goes back.
    again = 0 if way.checkpointing in (None, "none") else 1
    running = (b.working + again * max(0, b.saved - k) for b, k in zip(blocks, kept, strict=True))
    activations += max(running, default=0)
    for count in sorted(choices.counts):
        swapped = evenly_spaced(count, groups)
        sizes = [block.weights for block in blocks if block.name in swapped]
        pieces = [piece_bytes(size, machine.shards) for size in sizes] if machine.shards > 1 else []
        slot = max(pieces) * machine.shards if pieces else max(sizes, default=0)
        slots = min(prefetch + 1, count) * slot + sum(pieces)
        resident = sum(block.weights for block in blocks if block.name not in swapped)
        speed, from_file = _speed([block for block in blocks if block.name in swapped], machine, way.checkpointing)
        speed *= BOTH_WAYS if offload else 1.0
        yield _Candidate(
            swapped,
            prefetch,
            way,
            device=other_bytes + resident + slots + activations,
            host=sum(kept) if offload else 0,
            seconds=_pass_seconds(blocks, swapped, prefetch, way, speed),
            computing=computing,
            speed=speed,
            from_file=from_file,
        )


def _speed(swapped: Sequence[BlockCost], machine: Hardware, checkpointing: str | None) -> tuple[float, bool]:
    """Bytes per second at which these blocks come to the device, and whether they come from the file: there a thread
    reads one while the link carries another, so that the slower of both counts."""
    inside, file = sum(block.in_file for block in swapped), machine.file
    if file is None or not worth_streaming(inside, sum(block.weights for block in swapped), file.room):
        return machine.link, False
    return min(machine.link, file.speed(inside, turns=checkpointing is not None)), True


def _slowdowns(blocks: Sequence[BlockCost], fitting: Sequence[_Candidate]) -> list[float]:
    """Return each plan's time at worst as a multiple of the fastest's, if a block computes for as long as it is large.

    A slot more is a block less on the device, and evens out the copies of blocks of several sizes: which counts for
    more depends on the ratio of computing to copying, which is not known.
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
    """Simulate the seconds of a step once the first is over.

    Every copy starts when it is asked for (at the turn of a swapped block, for it and those ahead), when the
    computation before that is done and the link is free.
    """
    names = [block.name for block in blocks if block.name in swapped]
    number = {name: j for j, name in enumerate(names)}
    weights = {block.name: block.weights for block in blocks}
    slots = min(prefetch + 1, len(names))
    occupant: list[int | None] = [None] * slots
    copied = [0.0] * slots
    computed = link_free = before = 0.0

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
        before = computed
        for block in blocks:
            turn(block, block_seconds(block, *way)[0], 1)
        if way.checkpointing is not None:
            for block in reversed(blocks):
                turn(block, block_seconds(block, *way)[1], -1)
    return computed - before


def _text(chosen: _Candidate, total: int, machine: Hardware, fits: bool) -> str:
    sizes = f"{_size(chosen.device)} of {_size(machine.free)} free"
    spare = machine.free - chosen.device
    if fits:
        verdict = f"{'Fits' if chosen.swapped else 'Everything fits'} {machine.place} ({sizes})"
    elif spare < 0:
        verdict = f"Needs {_size(-spare)} more than is free {machine.place} ({sizes}), even with this"
    else:
        verdict = f"Needs {_size(chosen.host)} of RAM, of which {_size(machine.host)} are free, even with this"
    how: list[str] = []
    if machine.shards > 1 and chosen.swapped:
        how.append(f"{len(chosen.swapped)} of {total} blocks are shared by {machine.shards} devices")
        how.append(f"{chosen.prefetch} gathered ahead at {machine.link / 1e9:.1f} GB/s")
    elif chosen.from_file:
        how.append(
            f"{len(chosen.swapped)} of {total} blocks stream from the model file at {chosen.speed / 1e9:.1f} GB/s"
        )
        how.append(f"{chosen.prefetch} ahead")
    elif chosen.swapped:
        link = f" at {machine.link / 1e9:.0f} GB/s" if machine.link >= 1e9 else ""
        how += [f"{len(chosen.swapped)} of {total} blocks stream from RAM", f"{chosen.prefetch} ahead{link}"]
    if chosen.way.checkpointing is not None:
        how.append(f"checkpointing {chosen.way.checkpointing}")
    if chosen.way.budget == LEAST_BUDGET:
        how.append("saving only attention's results")
    text = f"{verdict}: {', '.join(how)}." if how else f"{verdict}."
    if chosen.computing > 0:
        waiting = chosen.seconds - chosen.computing
        waits = f", {waiting:.2f} s of it waiting for copies" if waiting > 0.02 * chosen.seconds else ""
        text += f" About {_seconds(chosen.seconds)} s per step{waits}."
    return text


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 1 else f"{seconds:.1f}" if seconds < 10 else f"{seconds:.0f}"


def _size(bytes_: int) -> str:
    return f"{bytes_ / GB:.1f} GB" if bytes_ >= GB // 10 else f"{bytes_ / 2**20:.1f} MB"
