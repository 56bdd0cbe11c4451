"""A population of plain torch modules: lanes go through the module one after the other, each as if it were alone.

A user's module knows no lane axis. Its parameters and buffers are kept as all tasks keep them, [L, …], so that
optimizers, rungs and checkpoints are the same; for each lane in turn, its slices take their places in one converted
module (`torch.func.functional_call`), and a forward and a backward pass are made. What a lane computes is what a
population of one computes, since that is what it is.

Torch's random numbers (dropout, noise) are seeded before every pass by (seed, step, part of the batch), so they are the
same for every recipe of a seed, and after a training is resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fp4dse.dse.layers.place import Place
from fp4dse.kernels import LaneNumerics
from fp4dse.kernels.block_scales import refuse_scales
from fp4dse.kernels.convert import attach, is_off, kept_precise, lines_of
from fp4dse.kernels.factors import refuse_factors
from fp4dse.kernels.lanes.parts import PRESENT, LaneParts
from fp4dse.kernels.learned import refuse
from fp4dse.kernels.structure import LOOK_UPS, is_product, structure_of
from fp4dse.tasks.optimizers import LaneOptimizer

if TYPE_CHECKING:
    from fp4dse.tasks.task import Task


class LaneOutputs:
    """Outputs of the module for each lane's batch, in the order of the lanes: whatever it returns."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.outputs = list(outputs)


class SequentialNumerics(LaneNumerics):
    """Numerics of lanes that are computed one after the other: each has numerics of one lane."""

    @cached_property
    def each(self) -> list[LaneNumerics]:
        """Numerics of every lane alone, which share the step."""
        seeds, device = self.seeds.tolist(), self.seeds.device
        lanes = [
            LaneNumerics([r], [s], device, self.steps, self.dtype) for r, s in zip(self.recipes, seeds, strict=True)
        ]
        for lane in lanes:
            lane.step = self.step
        return lanes

    def of_lane(self, lane: int) -> LaneNumerics:
        """Numerics of one lane, at the present step and in the present mode."""
        of = self.each[lane]
        of.training, of.counting, of.measuring, of.part = self.training, self.counting, self.measuring, self.part
        of.precise_stages, of.evaluation = self.precise_stages, self.evaluation
        return of

    def add_layer(self, layer: int, place: Place) -> None:
        for lane in self.each:
            lane.add_layer(layer, place)
        super().add_layer(layer, place)
        refuse(self.clips(layer), "plain torch modules have no place for what quantizers learn")
        refuse_factors(self.recipes, "plain torch modules have no place for them")
        refuse_scales(self.recipes, "plain torch modules have no place for them")

    def reseed(self, seeds: Sequence[int]) -> None:
        super().reseed(seeds)
        for lane, seed in zip(self.each, seeds, strict=True):
            lane.reseed([seed])

    def parts(self) -> Iterator[LaneParts]:
        for lane in self.each:
            yield from lane.parts()

    def lost(self) -> dict[str, dict[str, Tensor]]:
        lanes = [lane.lost() for lane in self.each]
        return {
            slot: {key: torch.cat([lane[slot][key] for lane in lanes]) for key in of} for slot, of in lanes[0].items()
        }

    def forget_lost(self) -> None:
        for lane in self.each:
            lane.forget_lost()

    def state(self) -> dict[str, Tensor]:
        """State of all lanes by name; zeros for a lane without state under a name that another lane has."""
        lanes = [lane.state() for lane in self.each]
        out = {}
        for name, example in {name: value for lane in lanes for name, value in lane.items()}.items():
            out[name] = torch.cat([lane.get(name, torch.zeros_like(example)) for lane in lanes])
            out[PRESENT + name] = torch.tensor([name in lane for lane in lanes])
        return out

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        names = [name for name in state if not name.startswith(PRESENT)]
        for i, lane in enumerate(self.each):
            lane.load_state({name: state[name][i : i + 1] for name in names if state[PRESENT + name][i]})


class CurrentLane:
    """The lane that is computed now: the layers of the converted module get their numerics from it."""

    def __init__(self) -> None:
        self.lane: LaneNumerics | None = None
        self.off = False

    def numerics(self, _device: torch.device) -> LaneNumerics:
        """Numerics of the lane."""
        assert self.lane is not None
        return self.lane


class SequentialLanes(nn.Module):
    """L lanes of a plain module. parameters: names as `named` gives them -> [L, …].

    In `model` stand the parameters and buffers under the module's own names; what is not trained is a buffer. Weights
    of products have a `place`, precise or not: recipes' weight decay is theirs.
    """

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, Tensor], numerics: SequentialNumerics, name: str
    ) -> None:
        super().__init__()
        self.numerics, self.current, self.device = numerics, CurrentLane(), numerics.step.device
        modules = dict(module.named_modules())
        structure = structure_of(modules)
        lines = lines_of(modules, structure)
        products = {line.name: line.place for line in lines if not isinstance(modules[line.name], LOOK_UPS)}
        self.notes = [f"lanes trained one at a time: {name} makes a plain torch module"]
        self.notes += structure.faults(kept_precise(numerics.recipe))
        self.notes += [f"{of.name} ({of.kind}) not quantized: {of.why_not}" for of in lines if of.why_not]
        self.model = nn.Module()
        names: dict[nn.Parameter, str] = {}
        self.fixed: dict[str, tuple[nn.Module, str]] = {}
        for key, value in parameters.items():
            kind, _, of = key.partition(":")
            owner = of.rpartition(".")[0]
            node, leaf = _branch(self.model, _path(of, modules))
            if kind == "buffer":
                node.register_buffer(leaf, value.clone())
                self.fixed[of] = node, leaf
                continue
            node.register_parameter(leaf, nn.Parameter(value))
            names[node.get_parameter(leaf)] = of
            if leaf == "weight" and owner in products and is_product(modules[owner]):
                node.place = products[owner]  # type: ignore[assignment]
        self.names = [names[p] for p in self.parameters()]
        for at, numbers in attach(modules, lines, self.current).items():
            for number in numbers:
                numerics.add_layer(number, products[at])
        self.module = [module.to(self.device)]  # in a list: its own parameters are nobody's

    def forward(self, x: Tensor) -> LaneOutputs:
        """x [L, B, …] -> what each lane's module makes of its batch, in eval mode."""
        return LaneOutputs([self.lane(i, x[i], [p[i] for p in self.parameters()], False) for i in range(len(x))])

    def lane(self, lane: int, x: Tensor, parameters: Sequence[Tensor], train: bool) -> Any:
        """Outputs of a lane's module for x [B, …] with the lane's parameters, in the order of `parameters()`.

        In train mode the step changes buffers; a pass that is not part of the training leaves them.
        """
        numerics, module = self.numerics, self.module[0].train(train)
        self.current.lane = numerics.of_lane(lane)
        self.current.off = is_off(numerics.recipes[lane]) and numerics.evaluation != "bf16"
        moves = train and numerics.training
        buffers = {name: node.get_buffer(leaf)[lane] for name, (node, leaf) in self.fixed.items()}
        if not moves:
            buffers = {name: value.clone() for name, value in buffers.items()}
        given = {**dict(zip(self.names, parameters, strict=True)), **buffers}
        with seeded(self.device, int(numerics.seeds[lane]), int(numerics.step), numerics.part):
            out = functional_call(module, given, (x,))
        if moves:
            for name, value in buffers.items():
                if given[name] is not value:  # another tensor stands in its place now
                    value.copy_(given[name])
        return out


def backward(
    task: Task, model: SequentialLanes, numerics: LaneNumerics, optimizer: LaneOptimizer, x: Tensor, y: Tensor
) -> Tensor:
    """Lane by lane what `backward.backward` does: mean loss [L], and gradients in the model's parameters."""
    parts, parameters = optimizer.accumulate, list(model.parameters())
    losses = torch.zeros(len(x), device=x.device)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for part, (of_x, of_y) in enumerate(zip(x.chunk(parts, 1), y.chunk(parts, 1), strict=True)):
        for lane in range(len(x)):
            leaves = [p.detach()[lane].requires_grad_() for p in parameters]
            with numerics.temporarily(part=part):
                out = model.lane(lane, of_x[lane], leaves, True)
                loss = task.loss(LaneOutputs([out]), of_y[lane : lane + 1])[0]
                scaled = loss if optimizer.loss_scale is None else loss * optimizer.loss_scale[lane]
                gradients = torch.autograd.grad(scaled * (1 / parts), leaves, allow_unused=True)
            for p, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    p.grad[lane] += gradient  # type: ignore[index]
            losses[lane] += loss.detach() * (1 / parts)
    return losses


def initial(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The module of a seed: what its initial weights are drawn from is keyed by it."""
    with seeded(torch.device("cpu"), seed, -1, 0):
        return make()


def named(module: nn.Module) -> dict[str, Tensor]:
    """Tensors of a lane of the module: `parameter:NAME` for those that are trained, `buffer:NAME` for the others."""
    trained = {f"parameter:{name}": p.detach() for name, p in module.named_parameters() if p.requires_grad}
    return trained | {f"buffer:{name}": value.detach() for name, value in _fixed(module)}


@contextmanager
def seeded(device: torch.device, *key: int) -> Iterator[None]:
    """Torch's random numbers on the CPU and on the device follow from the key; afterwards they go on as before."""
    number = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little") >> 1
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    before = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(number)
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def _fixed(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers and parameters that are not trained, by name."""
    yield from module.named_buffers()
    yield from ((name, p) for name, p in module.named_parameters() if not p.requires_grad)


def _path(name: str, modules: Mapping[str, nn.Module]) -> list[str]:
    """Path of a tensor in the tree of modules. It follows the tensor's name, except for weights that
    nn.MultiheadAttention has without a layer: `in_proj_weight` is the weight of `in_proj`."""
    owner, _, leaf = name.rpartition(".")
    if isinstance(modules.get(owner), nn.MultiheadAttention) and leaf.endswith("_weight"):
        name = f"{name.removesuffix('_weight')}.weight"
    return name.split(".")


def _branch(root: nn.Module, path: Sequence[str]) -> tuple[nn.Module, str]:
    """The module in which the last of the names stands, made if it is not there."""
    for part in path[:-1]:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    return root, path[-1]
