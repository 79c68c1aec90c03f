"""Work of the Triton kernels that inductor writes: the memory that they touch, and the cycles that they take of an SM.

A kernel is slow for three reasons, and each is counted here, without a GPU:

- *Memory*: every pointer's 32-byte sectors that the programs of the grid touch, each once. Inductor's own count adds a
  region again for each expression that reads it, and leaves out buffers that a kernel writes only to read them again
  itself.
- *Order*: an access of a warp takes the L1 cache as many passes as it touches lines of 128 bytes (NVIDIA, CUDA C++
  Best Practices Guide, "Coalesced Access to Global Memory"). Which lane has which element follows Triton's pass
  (`Coalesce.cpp`): lanes run along the axis whose addresses are consecutive, and along the first axis of the tile if
  there is none, which in a tile of 16 × 16 × 16 is the slowest.
- *Instructions*: of the machine code (SASS) that Triton and NVIDIA's assembler make for an H100; a loop's as often as
  it runs. An SM issues 4 instructions of a warp in a cycle (NVIDIA H100 white paper). Accesses to shared memory pass
  through the L1 cache too.

Addresses are those of a few programs spread over the grid, run in NumPy; values are not computed.
"""

import importlib.util
import math
import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SMS = 132
ISSUED = 4
LINE = 128
SECTOR = 32
PROGRAMS = 17  # of the grid, spread evenly
SIZES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "i1": 1}
_KERNEL = re.compile(r"(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)'''", re.S)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*)")
_work_cache: dict[str, "Work"] = {}


@dataclass(frozen=True)
class Work:
    """Work of one launch.

    bytes_moved: between the card's memory and the kernel.
    cycles: of one SM, with the work spread evenly.
    """

    bytes_moved: int
    cycles: int


def work_by_kernel(code: str) -> dict[str, Work]:
    """Measure the kernels of a module that inductor wrote: name → work of one launch."""
    works = {}
    for name, source in _KERNEL.findall(code):
        key = source.replace(name, "kernel")
        if key not in _work_cache:
            _work_cache[key] = _work(name, source)
        works[name] = _work_cache[key]
    return works


def _work(name: str, source: str) -> Work:
    """Measure one kernel with the block sizes that torch starts with, the fastest if it tries several."""
    kernel = _loaded(name, source)
    signature = kernel.triton_meta["signature"]
    numels = {axis: int(n) for axis, n in re.findall(r"^    (\w+)numel = (\d+)", source, re.M)}
    body = source[source.index(f"def {name}(") :]
    return min(
        (_work_with(kernel, config, signature, numels, body, name) for config in kernel.configs),
        key=lambda work: (work.cycles, work.bytes_moved),
    )


def _loaded(name: str, source: str) -> Any:
    """The kernel as inductor's runtime holds it, with its configurations."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.py"
        file.write_text(source.replace("triton_helpers.set_driver_to_gpu()", ""), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("kernel_of_inductor", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        kernel.fn.src  # noqa: B018  read while the file is there
    return kernel


def _work_with(
    kernel: Any, config: Any, signature: Mapping[str, str], numels: Mapping[str, int], body: str, name: str
) -> Work:
    blocks, warps = config.kwargs, config.num_warps
    grid = [math.ceil(numels.get(axis, 1) / blocks.get(f"{axis.upper()}BLOCK", 1)) for axis in "xyz"]
    programs = math.prod(grid)
    passes = 0
    sectors = defaultdict(int)
    reaches = {}
    pointers_written: set[str] = set()
    for index in range(PROGRAMS):
        place = index * (programs - 1) // (PROGRAMS - 1)
        program = place % grid[0], place // grid[0] % grid[1], place // grid[0] // grid[1]
        touched = defaultdict(list)
        for access in _accesses(body, name, signature, blocks, program):
            passes += access.passes(warps)
            touched[access.pointer].append(access.sectors())
            if access.writes:
                pointers_written.add(access.pointer)
        for pointer, lists in touched.items():
            distinct = np.unique(np.concatenate(lists))
            sectors[pointer] += len(distinct)
            if len(distinct):
                low, high = reaches.get(pointer, (distinct[0], distinct[-1]))
                reaches[pointer] = min(low, distinct[0]), max(high, distinct[-1])
    byte_count = 0
    for pointer, count in sectors.items():
        low, high = reaches.get(pointer, (0, -1))
        span_bytes = SECTOR * min(count * programs // PROGRAMS, int(high - low) + 1)
        twice = pointer.startswith("in_out") and pointer in pointers_written and _reads_first(body, pointer)
        byte_count += span_bytes * (1 + twice)
    trips = math.ceil(numels.get("r0_", 1) / blocks.get("R0_BLOCK", numels.get("r0_", 1)))
    issued, shared_accesses = _instructions(_assembled(kernel, config, signature), trips)
    program_cycles = warps * (issued / ISSUED + shared_accesses) + passes / PROGRAMS
    return Work(int(byte_count), int(programs * program_cycles / SMS))


def _reads_first(body: str, pointer: str) -> bool:
    """Return whether a kernel reads data at this pointer that others wrote."""
    first = min((body.find(f"tl.{verb}({pointer} ") % (1 << 60), verb) for verb in ("load", "store"))
    return first[1] == "load"


# Addresses


@dataclass
class _Access:
    """Addresses of one access of a program. index: in elements, over the tile; mask: which are accessed."""

    pointer: str
    size: int
    index: np.ndarray
    mask: np.ndarray
    writes: bool

    def sectors(self) -> np.ndarray:
        return np.unique(self.index[self.mask] * self.size // SECTOR)

    def passes(self, warps: int) -> int:
        """Lines of 128 bytes that the accesses of each warp touch, added up."""
        runs = [self._run(axis) for axis in range(self.index.ndim)]
        order = sorted(range(self.index.ndim), key=lambda axis: -runs[axis])
        count = self.index.size
        wide = max(1, min(16 // self.size, runs[order[0]], count // (32 * warps))) if count > 1 else 1
        lanes = min(32 * wide, count)
        axes = order[::-1]
        lines = np.transpose(self.index, axes).reshape(-1, lanes) * self.size // LINE
        lines = np.sort(np.where(np.transpose(self.mask, axes).reshape(-1, lanes), lines, -1), axis=1)
        return int((np.diff(lines, axis=1) != 0).sum() + (lines[:, 0] >= 0).sum())

    def _run(self, axis: int) -> int:
        """Return the number of contiguous, aligned elements along an axis: a power of two."""
        length, run = self.index.shape[axis], 1
        along = np.moveaxis(self.index, axis, -1)
        while run * 2 <= length and length % (run * 2) == 0:
            groups = along.reshape(-1, run * 2)
            aligned = groups[:, 0] * self.size % min(16, 2 * run * self.size) == 0
            if not (aligned.all() and (np.diff(groups, axis=1) == 1).all()):
                break
            run *= 2
        return run


def _accesses(
    body: str, name: str, signature: Mapping[str, str], blocks: Mapping[str, int], program: tuple[int, int, int]
) -> Iterator[_Access]:
    """Run a kernel's Python for one program, with addresses and masks as they are and zeros for values."""
    language = _Language(program)
    space: dict[str, Any] = {"tl": language, **dict.fromkeys(("libdevice", "tl_math", "triton_helpers"), _Values())}
    exec(re.sub(r" ?: tl\.constexpr", "", body), space)  # inductor's own text, made in this process
    arguments: dict[str, Any] = {}
    for argument, kind in signature.items():
        if kind.startswith("*"):
            arguments[argument] = _Pointer(argument, SIZES[kind[1:]])
        else:
            arguments[argument] = blocks.get(argument, 1)
    with np.errstate(all="ignore"):
        space[name](**arguments)
    return iter(language.accesses)


class _Tile(np.ndarray):
    """A tensor of a program."""

    def to(self, *_: Any, **__: Any) -> "_Tile":
        return self


def _tile(value: Any) -> _Tile:
    return np.asarray(value).view(_Tile)


@dataclass
class _Pointer:
    name: str
    size: int
    index: Any = 0

    def __add__(self, offset: Any) -> "_Pointer":
        return _Pointer(self.name, self.size, self.index + np.asarray(offset))


def _zeros_like(*values: Any, **_: Any) -> _Tile:
    """Return zeros as the result of any function of values."""
    shapes = [np.shape(value) for value in values if isinstance(value, np.ndarray | int | float | np.generic)]
    return _tile(np.zeros(np.broadcast_shapes(*shapes)))


class _Values:
    """Functions that compute values: they keep the shape."""

    def __getattr__(self, name: str) -> Any:
        if name == "welford_reduce":
            return lambda value, *_: (_zeros_like(value),) * 3
        if name.startswith("welford"):
            return lambda mean, second, weight, axis: (_tile(np.sum(mean, axis)),) * 3
        if name in ("max2", "min2", "any", "prod"):
            return lambda value, axis: _tile(np.sum(value, axis))
        return _zeros_like


class _Language(_Values):
    """Triton's language, as far as inductor's kernels use it."""

    def __init__(self, program: tuple[int, int, int]):
        self.program, self.accesses = program, []

    def program_id(self, axis: int) -> int:
        return self.program[axis]

    def arange(self, start: int, end: int) -> _Tile:
        return _tile(np.arange(start, end))

    def full(self, shape: Any, value: Any, dtype: Any = None) -> _Tile:
        return _tile(np.full(shape, value))

    def zeros(self, shape: Any, dtype: Any = None) -> _Tile:
        return _tile(np.zeros(shape))

    def broadcast_to(self, value: Any, shape: Any) -> _Tile:
        return _tile(np.broadcast_to(np.asarray(value), shape))

    def reshape(self, value: Any, *shape: Any) -> _Tile:
        return _tile(np.reshape(value, shape[0] if len(shape) == 1 else shape))

    def where(self, condition: Any, a: Any, other: Any) -> _Tile:
        return _tile(np.where(condition, a, other))

    def sum(self, value: Any, axis: int) -> _Tile:
        return _tile(np.sum(value, axis))

    max = min = sum

    def range(self, *bounds: int, **_: Any) -> range:
        return range(*(int(bound) for bound in bounds))

    static_range = range

    def debug_barrier(self) -> None:
        pass

    def device_assert(self, *_: Any) -> None:
        pass

    def load(self, pointer: _Pointer, mask: Any = None, other: Any = None, **_: Any) -> _Tile:
        return self._access(pointer, mask, (), False)

    def store(self, pointer: _Pointer, value: Any, mask: Any = None, **_: Any) -> None:
        self._access(pointer, mask, np.shape(value), True)

    def _access(self, pointer: _Pointer, mask: Any, shape: tuple[int, ...], writes: bool) -> _Tile:
        mask = np.asarray(True if mask is None else mask)
        shape = np.broadcast_shapes(np.shape(pointer.index), mask.shape, shape)
        index, mask = np.broadcast_to(pointer.index, shape), np.broadcast_to(mask, shape)
        self.accesses.append(_Access(pointer.name, pointer.size, np.asarray(index), np.asarray(mask), writes))
        return _tile(np.zeros(shape))


# Instructions


def _assembled(kernel: Any, config: Any, signature: Mapping[str, str]) -> list[str]:
    """The kernel's machine code for an H100, line by line."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(signature)
    constants = {(names.index(name),): value for name, value in config.kwargs.items() if name in names}
    source = ASTSource(kernel.fn, signature, constexprs=constants, attrs=kernel.triton_meta["configs"][0])
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        listed = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def _instructions(lines: list[str], trips: int) -> tuple[int, int]:
    """Instructions of one warp, and those of them that access shared memory. trips: of each loop."""
    code = [line for line in lines if _INSTRUCTION.match(line) or line.startswith(".L_x_")]
    code = code[: max(place for place, line in enumerate(code) if "EXIT" in line) + 1]
    times, labels = [1] * len(code), {}
    for place, line in enumerate(code):
        if line.startswith("."):
            labels[line.strip().rstrip(":")] = place
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if target is not None and target[1] in labels:
            for inside in range(labels[target[1]], place + 1):
                times[inside] *= trips
    issued = shared_accesses = 0
    for count, line in zip(times, code, strict=True):
        if (instruction := _INSTRUCTION.match(line)) is None or re.search(r"\bNOP\b", instruction[1]):
            continue
        issued += count
        shared_accesses += count * bool(re.search(r"\b(LDS|STS|LDSM|STSM)\b", instruction[1]))
    return issued, shared_accesses
