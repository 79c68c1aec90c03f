"""Weights of a parameter group in one tensor: the same steps as one by one, saved by name, in few kernels."""

import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tessera.common.rng import generator
from tessera.lora.flat_group import FlatGroup
from tessera.lora.network import LoraNetwork
from tessera.lora.options import NetworkOptions
from tessera.memory.weights.frozen_linear import FrozenLinear
from tessera.train.checkpoint.state import TrainingState
from tessera.train.loop.learner import Learner
from tessera.train.optim.averaging import LoraAverage
from tessera.train.optim.max_norm import MaxNorm
from tessera.train.optim.optimizers import build_optimizer, build_scheduler, restore_optimizer, state_of
from tessera.train.optim.options import OptimizerOptions
from tessera.train.optim.param_groups import parameter_groups
from tessera.train.optim.registry import is_elementwise
from tessera.train.optim.state_dict import pack_state, unpack_state
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

# No size is a multiple of what a vector holds, nor of the alignment.
LAYERS = {"a": (24, 40), "b": (33, 7), "c": (129, 65)}
STEPS, TOTAL = 6, 8
FP16 = torch.float16
BF16 = torch.bfloat16
FP32 = torch.float32


def network_of(layers: Any = LAYERS, **options: Any) -> LoraNetwork:
    linears: Any = {
        name: SimpleNamespace(
            shape=shape, kernel=None, weight=torch.zeros(1), read_on_device=None, attach=lambda _: None
        )
        for name, shape in layers.items()
    }
    network = LoraNetwork(NetworkOptions(**{"rank": 5, "alpha": 8.0} | options), list(layers), linears, 3)
    with torch.no_grad():
        for number, weight in enumerate(network.parameters()):
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator(1, number)))
    return network


def loss_of(network: LoraNetwork, dtype: torch.dtype, key: tuple[int, int], omitted: str = "") -> Tensor:
    total = torch.zeros(())
    for name, adapter in network.adapters.items():
        if name != omitted:
            x = torch.randn(2, 3, adapter.in_features, generator=generator(2, name, *key)).to(dtype)
            frozen = FrozenLinear(torch.zeros(adapter.out_features, adapter.in_features, dtype=dtype), None, None)
            y = adapter(x, frozen, None).float()
            total = total + y.square().mean() + y.mean()
    return total


class OneByOne:
    """The steps as a learner took them with every weight for itself, its casts made in the forward."""

    def __init__(self, network: LoraNetwork, options: OptimizerOptions, dtype: torch.dtype):
        self.network, self.options = network, options
        weights = dict(zip(network.master_weights(), network.parameters(), strict=True))
        groups = parameter_groups(weights, options.learning_rate, network.options.lora_plus_ratio)
        self.optimizer = build_optimizer(options, groups)
        self.scheduler = build_scheduler(options, self.optimizer, TOTAL)
        self.average = LoraAverage(options.ema_decay, network.master_weights()) if options.ema_decay else None
        limit = network.options.scale_weight_norms
        self.max_norm = MaxNorm(limit, network.adapters.values()) if limit else None
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype == FP16)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def clip(self) -> Tensor:
        self.scaler.unscale_(self.optimizer)
        return nn.utils.clip_grad_norm_(self.network.parameters(), self.options.max_grad_norm)

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.max_norm is not None:
            self.max_norm.apply()
        if self.average is not None:
            self.average.update()
        self.scheduler.step()

    def state(self) -> dict[str, Any]:
        return {"optimizer": state_of(self.optimizer), "average": self.average.state() if self.average else {}}


def train(learner: Any, dtype: torch.dtype, steps: range, micro_batches: int = 2, omitted: str = "") -> list[float]:
    norms = []
    for step in steps:
        learner.zero_grad()
        for micro in range(micro_batches):
            learner.network.flat.write_casts()
            learner.backward(loss_of(learner.network, dtype, (step, micro), omitted if step % 3 == 1 else ""))
        norms.append(learner.clip().item())
        learner.step()
    return norms


def same_state(learner: Any, other: Any) -> bool:
    (a, a_tree), (b, b_tree) = (
        pack_state({name: candidate.state()[name] for name in ("optimizer", "average")})
        for candidate in (learner, other)
    )
    return a_tree == b_tree and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def same_weights(a: LoraNetwork, b: LoraNetwork) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


SGD = {"optimizer": "custom", "optimizer_class": "torch.optim.SGD", "optimizer_args": "momentum=0.9\nnesterov=True"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw", "ema_decay": 0.9},
    "amsgrad": {"optimizer": "adamw", "optimizer_args": "amsgrad=True"},
    "fused": {"optimizer": "adamw", "optimizer_args": "fused=True"},
    "lion": {"optimizer": "lion", "ema_decay": 0.9},
    "sgd": SGD,
    "schedule-free": {"optimizer": "adamw_schedulefree"},
}
RUN = {"learning_rate": 1e-2, "weight_decay": 0.1, "lr_scheduler": "cosine", "warmup_steps": 2, "max_grad_norm": 0.2}


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "fused"])  # on a CPU its ends of rows differ
def test_the_flat_step_takes_the_steps_of_weights_one_by_one_bit_for_bit(name, dtype):
    options = OptimizerOptions(**RUN | OPTIMIZERS[name])
    for settings in ({}, {"lora_plus_ratio": 4.0}, {"scale_weight_norms": 0.3} if name != "schedule-free" else {}):
        flat, single = network_of(**settings), network_of(**settings)
        learner = Learner(flat, options, TOTAL, dtype, "cpu")
        other = OneByOne(single, options, dtype)
        assert [len(g["params"]) for g in learner.optimizer.param_groups] == [1] * (
            2 if "lora_plus_ratio" in settings else 1
        )
        assert train(learner, dtype, range(STEPS)) == train(other, dtype, range(STEPS))
        assert learner.flat.joined and same_weights(flat, single) and same_state(learner, other)
        assert not same_weights(flat, network_of(**settings))
        assert learner.scaler.get_scale() == other.scaler.get_scale()
        with learner.as_saved():
            saved = [p.detach().clone() for p in flat.parameters()]
        assert same_weights(flat, single)
        assert learner.saves_other_weights != all(map(torch.equal, saved, single.parameters()))


@pytest.mark.parametrize("algorithm", ["lora", "lokr", "loha"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_casts_change_no_bit_of_a_run_in_bf16(optimizer, algorithm):
    options, settings = OptimizerOptions(**RUN | {"optimizer": optimizer}), {"algorithm": algorithm}
    flat, single = network_of(**settings), network_of(**settings)
    learner, other = Learner(flat, options, TOTAL, BF16, "cpu"), OneByOne(single, options, BF16)
    for adapter in flat.adapters.values():
        assert adapter.casts.keys() == ({} if algorithm == "loha" else dict(adapter.named_parameters())).keys()
    assert train(learner, BF16, range(STEPS)) == train(other, BF16, range(STEPS))
    assert same_weights(flat, single) and same_state(learner, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_weight_without_a_gradient_sits_out_the_step(name):
    options = OptimizerOptions(**RUN | OPTIMIZERS[name])
    flat, single = network_of(), network_of()
    learner, other = Learner(flat, options, TOTAL, FP32, "cpu"), OneByOne(single, options, FP32)
    for candidate in (learner, other):
        train(candidate, FP32, range(STEPS), omitted="b")
    assert not learner.flat.joined and same_weights(flat, single) and same_state(learner, other)


def test_a_nan_in_a_skipped_step_leaves_nothing_behind():
    learner = Learner(network_of(), OptimizerOptions(**RUN), TOTAL, FP16, "cpu")
    train(learner, FP16, range(1))
    initial = [p.detach().clone() for p in learner.weights]
    learner.zero_grad()
    learner.backward(loss_of(learner.network, FP16, (1, 0)) * float("nan"))
    assert learner.may_step(learner.clip().item())
    learner.step()
    assert all(map(torch.equal, initial, learner.weights))
    train(learner, FP16, range(2, 3))
    assert not any(map(torch.equal, initial, learner.weights))
    assert all(p.isfinite().all() for p in learner.weights)


def loaded(learner: Learner, network: LoraNetwork, options: OptimizerOptions, dtype: torch.dtype, step: int) -> Learner:
    fields = unpack_state(*pack_state(learner.state()))
    state = TrainingState(step=step, batches=2 * step, loss=[], lineage="", environment={}, parts=[], **fields)
    resumed = Learner(network, options, TOTAL, dtype, "cpu")
    resumed.load(state)
    return resumed


@pytest.mark.parametrize("omitted", ["", "b"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_goes_on_bit_for_bit(name, omitted):
    options = OptimizerOptions(**RUN | OPTIMIZERS[name])
    whole = Learner(network_of(), options, TOTAL, BF16, "cpu")
    train(whole, BF16, range(3), omitted=omitted)
    resumed = loaded(whole, network_of(), options, BF16, 3)
    # Weights that took as many steps as the others are joined again; SGD and Lion count none.
    assert resumed.flat.joined == (not omitted or name in ("sgd", "lion", "schedule-free"))
    for learner in (whole, resumed):
        train(learner, BF16, range(3, STEPS), omitted=omitted)
    assert same_weights(whole.network, resumed.network) and same_state(whole, resumed)


def test_a_state_that_was_saved_one_by_one_goes_on_joined():
    options = OptimizerOptions(**RUN)
    old = OneByOne(network_of(), options, FP32)
    train(old, FP32, range(3))
    new = network_of()
    new.load_master_weights(old.network.master_weights())
    learner = Learner(new, options, TOTAL, FP32, "cpu")
    learner.flat.split()
    saved = unpack_state(*pack_state(state_of(old.optimizer)))
    restore_optimizer(learner.optimizer, learner.scheduler, saved, old.scheduler.state_dict())
    learner.flat.join()
    for candidate in (learner, old):
        train(candidate, FP32, range(3, STEPS))
    assert learner.flat.joined and same_weights(learner.network, old.network) and same_state(learner, old)


@pytest.mark.parametrize("saved", [True, False])
def test_a_state_does_not_switch_fused(saved):
    def options(fused: bool) -> OptimizerOptions:
        return OptimizerOptions(**RUN, optimizer_args=f"fused={fused}")

    earlier = Learner(network_of(), options(saved), TOTAL, FP32, "cpu")
    train(earlier, FP32, range(2))
    assert earlier.state()["optimizer"]["param_groups"][0]["fused"] is saved
    resumed = loaded(earlier, network_of(), options(not saved), FP32, 2)
    assert [group["fused"] for group in resumed.optimizer.param_groups] == [not saved]
    train(resumed, FP32, range(2, STEPS))
    train(earlier, FP32, range(2, STEPS))
    for a, b in zip(earlier.weights, resumed.weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_optimizers_that_look_at_a_matrix_are_not_joined():
    assert is_elementwise("pytorch_optimizer.Lion", {"weight_decouple": False})
    for argument in ("use_gc", "adanorm", "cautious"):  # of an older Lion
        assert not is_elementwise("pytorch_optimizer.Lion", {argument: True})
    for name in ("prodigy", "adafactor", "came", "muon", "adamw8bit"):
        assert not OptimizerOptions(optimizer=name).is_elementwise


class Kernels(TorchDispatchMode):
    """Counts what is launched, but for views and allocations; a foreach op counts once for each of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if (
            not func.is_view
            and "empty" not in name
            and "record_function" not in name
            and name not in ("device", "detach")
        ):
            self.launches[name] += len(args[0]) if args and isinstance(args[0], list | tuple) else 1
        return func(*args, **kwargs or {})


def counted(learner: Any) -> dict[str, dict[str, int]]:
    """The kernels of each part that follows a backward in bf16, on a CUDA device that is not there."""
    network, counts = learner.network, {}
    for weight in (c for group in network.flat for c in group.casts) if network.flat else network.parameters():
        weight.grad = torch.empty_like(weight)
    parts = (network.flat.write_casts, network.flat.gather, learner.clip, learner.step, learner.zero_grad)
    for part in parts:
        with Kernels() as kernels:
            part()
        counts[part.__name__] = dict(kernels.launches)
    return counts


def test_launches_of_a_step_do_not_grow_with_the_network():
    layers = {f"{i}": (64, 64) for i in range(40)}
    networks = network_of(layers), network_of(layers)
    with FakeTensorMode():
        for adapter in (a for network in networks for a in network.adapters.values()):
            for parameter, weight in list(adapter.named_parameters()):
                adapter._parameters[parameter] = nn.Parameter(torch.zeros(weight.shape, device="cuda"))
        learner = Learner(networks[0], OptimizerOptions(), TOTAL, BF16, "cuda")
        reference = OneByOne(networks[1], OptimizerOptions(optimizer_args="foreach=True"), BF16)
        assert learner.optimizer.param_groups[0]["fused"] is True
        for candidate in (learner, reference):
            counted(candidate)  # the first step makes the state
        flat, single = counted(learner), counted(reference)
    norm = {"linalg_vector_norm": 81, "stack": 80, "add": 1, "reciprocal": 1, "mul": 1, "clamp": 1}
    assert flat == {
        "write_casts": {"copy_": 1},
        "gather": {"_foreach_copy_": 80},
        "clip": norm | {"mul_": 1},
        "step": {"_foreach_add_": 1, "_fused_adamw_": 1},
        "zero_grad": {"zero_": 1},
    }
    assert single["clip"] == norm | {"mul_": 80}
    assert sum(count for name, count in single["step"].items() if name != "_local_scalar_dense") == 9 * 80


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_backward_that_broke_off_leaves_nothing_behind(dtype: torch.dtype) -> None:
    """As one that runs out of memory, which is tried again."""

    def began(network: LoraNetwork) -> Learner:
        learner = Learner(network, OptimizerOptions(**RUN), TOTAL, dtype, "cpu")
        learner.zero_grad()
        network.flat.write_casts()
        return learner

    def out_of_memory(_: Tensor) -> None:
        raise torch.OutOfMemoryError("here")

    network = network_of()
    learner = began(network)
    first = (network.flat[0].casts or network.flat[0].weights)[0]
    hook = first.register_hook(out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        learner.backward(loss_of(network, dtype, (0, 0)))
    hook.remove()
    learner.zero_grad()
    network.flat.write_casts()
    learner.backward(loss_of(network, dtype, (0, 0)))
    reference = network_of()
    began(reference).backward(loss_of(reference, dtype, (0, 0)))
    for weight, other in zip(network.parameters(), reference.parameters(), strict=True):
        assert weight.grad is not None and other.grad is not None and torch.equal(weight.grad, other.grad)


def test_casts_are_not_kept_where_a_block_runs_several_times() -> None:
    """Their gradients would be summed in bf16."""
    network = network_of()
    assert network.casts_in(BF16) == BF16 and network.casts_in(FP32) is None
    network.blocks_run_once = False
    assert network.casts_in(BF16) is None


def test_casts_are_the_master_weights_again_behind_a_forward_without_the_lora() -> None:
    network = network_of()
    Learner(network, OptimizerOptions(**RUN), TOTAL, BF16, "cpu")
    network.flat.write_casts()
    initial = [cast.detach().clone() for cast in network.flat[0].casts]
    with network.switched_off():
        assert not any(cast.any() for cast in network.flat[0].casts)
    assert all(torch.equal(cast, copy) for cast, copy in zip(network.flat[0].casts, initial, strict=True))


def test_states_are_joined_without_holding_them_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    network = network_of()
    learner = Learner(network, OptimizerOptions(**RUN), TOTAL, FP32, "cpu")
    train(learner, FP32, range(1))
    assert learner.flat is not None
    learner.flat.split()
    states = [learner.optimizer.state[weight] for weight in network.parameters()]
    first = [weakref.ref(state["exp_avg"]) for state in states]
    alive: list[int] = []
    joined = FlatGroup.joined

    def counted(self: FlatGroup, tensors: Any) -> Tensor:
        alive.append(sum(ref() is not None for ref in first))
        return joined(self, tensors)

    monkeypatch.setattr(FlatGroup, "joined", counted)
    del states
    learner.flat.join()
    assert learner.flat.joined and alive == [6, 0]
