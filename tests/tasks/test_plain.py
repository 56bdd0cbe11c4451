"""A task in plain torch: the lanes of a module that knows of none, each as if it were alone."""

import warnings

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from fp4dse.dse import ConfigError, Quantizer, Recipe
from fp4dse.dse.optimizer import SGD
from fp4dse.dse.training import Training
from fp4dse.tasks import Lane, train
from fp4dse.tasks.engine import Population, Pruning, Stopped
from fp4dse.tasks.job import Rung
from fp4dse.tasks.optimizers import decays
from fp4dse.tasks.own.one_by_one import SequentialLanes, SequentialNumerics, initial, named
from fp4dse.tasks.own.plain import plain_task
from fp4dse.tasks.threads import torch_threads
from tests.tasks.plain_net import Net, record, task_of

OFF = Recipe.uniform(Quantizer.named("none"))


@pytest.fixture(autouse=True)
def one_thread():
    with torch_threads(1):
        yield


def lanes_of(task, names=("nvfp4", "nvfp4-sr"), seeds=(0, 1)):
    return [Lane(Recipe.named(name), task.lr, seed) for name in names for seed in seeds]


def test_a_training_that_was_stopped_goes_on_bit_for_bit(tmp_path):
    task, checkpoint = task_of(), tmp_path / "checkpoint.pt"
    lanes = [*lanes_of(task, ("ue5m3-graphcore",)), *lanes_of(task, ("ue5m3-graphcore",), (2,))]
    whole = train(task, lanes).lanes
    asked = iter([False] * 5 + [True])
    with pytest.raises(Stopped):
        train(task, lanes, checkpoint=checkpoint, should_stop=lambda: next(asked))
    torch.manual_seed(123)  # whatever else has drawn numbers
    assert train(task, lanes, checkpoint=checkpoint).lanes == whole


def test_recording_changes_no_bit_of_the_training():
    """It makes passes in train mode beside the training, which move no buffer."""
    task = task_of(steps=4)
    lane = [Lane(Recipe.named("nvfp4-sr"), task.lr, 0)]
    (recorded,), (plain,) = train(task, lane, record=True).lanes, train(task, lane).lanes
    assert (recorded.curve_loss, recorded.val_loss) == (plain.curve_loss, plain.val_loss)


def test_lanes_that_a_rung_keeps_go_on_as_if_nothing_had_happened():
    task = task_of()
    lanes = lanes_of(task, ("ue5m3-graphcore", "nvfp4"), (0,))[:1] + lanes_of(task, ("ue5m3-graphcore",), (1, 2))
    whole = train(task, lanes).lanes
    pruning = Pruning([Rung(4, 0.5)], lambda losses, *_: [False, True, True])
    kept = train(task, lanes, pruning=pruning).lanes
    assert kept[0].status == "pruned"
    assert kept[1:] == whole[1:]


def test_without_quantizers_it_is_the_training_loop_that_everybody_writes():
    """SGD on the same batches: the same weights but for the order of sums, and the same batch-norm statistics."""
    plain = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4))
    task = task_of(model=lambda: nn.Sequential(*plain.children()), loss=nn.functional.cross_entropy, metrics={})
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    recipe = msgspec.structs.replace(OFF, training=Training(optimizer=SGD(momentum=0.5)))
    p = Population(task, [Lane(recipe, 0.1, 3)], "cpu")
    for step in range(5):
        p.train_step(step)
    plain.load_state_dict(start)
    plain.train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    for step in range(5):
        rows = p.batches(torch.tensor(step))[0]
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            plain(task.problem([3]).train_x[0][rows]), task.problem([3]).train_y[0][rows]
        ).backward()
        optimizer.step()
    ours = {name.removeprefix("model."): value[0] for name, value in p.model.state_dict().items()}
    assert ours.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        assert torch.allclose(ours[name], value, rtol=1e-4, atol=1e-5), name


def test_buffers_move_in_training_and_not_in_evaluation():
    task = task_of()
    p = Population(task, lanes_of(task), "cpu")
    p.train_step(0)
    p.train_step(1)
    state = p.model.state_dict()
    assert state["model.seen"].tolist() == [32] * 4
    assert state["model.norm.num_batches_tracked"].tolist() == [2] * 4
    mean = state["model.norm.running_mean"].clone()
    assert not torch.equal(mean[0], mean[1])  # of two seeds
    p.numerics.training = False
    with torch.no_grad():
        p.model(task.problem([0]).val_x.repeat(4, 1, 1))
    assert torch.equal(p.model.state_dict()["model.norm.running_mean"], mean)


def test_initial_weights_and_dropout_follow_from_the_seed_alone():
    task = task_of()
    first, second = task.problem([0, 1]).init, task.problem([1]).init
    assert all(torch.equal(first[name][1], second[name][0]) for name in first)
    assert not torch.equal(first["parameter:stem.weight"][0], first["parameter:stem.weight"][1])
    before = torch.random.get_rng_state()
    losses = [train(task, [Lane(recipe, task.lr, 0)]).lanes[0].curve_loss for recipe in (OFF, OFF)]
    assert losses[0] == losses[1]
    assert torch.equal(torch.random.get_rng_state(), before)  # nobody else's numbers are touched


def test_weights_of_products_decay_and_nothing_else_does():
    p = Population(task_of(), lanes_of(task_of())[:1], "cpu")
    decaying = {name for (name, _), flag in zip(p.model.named_parameters(), decays(p.model), strict=True) if flag}
    products = ["stem", "blocks.0.0", "blocks.1.0", "attention.in_proj", "attention.out_proj"]
    assert decaying == {f"model.{name}.weight" for name in products}
    assert "model.frozen.weight" not in dict(p.model.named_parameters())


def test_the_row_says_how_lanes_were_trained_and_what_was_not_quantized():
    model = lambda: nn.Sequential(  # noqa: E731
        nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 1), nn.Flatten(), nn.Linear(16, 16), nn.Linear(16, 4)
    )
    task = task_of(model=model, loss=nn.functional.cross_entropy, metrics={})
    said = train(task, [Lane(Recipe.named("nvfp4"), task.lr, 0)]).fallbacks
    assert "lanes trained one at a time: own.py:build makes a plain torch module" in said
    assert "1 (Conv1d) not quantized: not one of Linear, Conv2d, MultiheadAttention" in said


def test_precise_layers_compute_as_in_the_bf16_baseline():
    """Of three layers the first and the last are precise: with the second precise, too, nothing is left of NVFP4."""
    model = lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))  # noqa: E731
    task = task_of(model=model, loss=nn.functional.cross_entropy, metrics={})
    precise = msgspec.structs.replace(Recipe.named("nvfp4").precise, first=1)
    recipes = [Recipe.named("bf16"), msgspec.structs.replace(Recipe.named("nvfp4"), precise=precise)]
    baseline, all_precise, half = (
        train(task, [Lane(recipe, task.lr, 0)]).lanes[0] for recipe in (*recipes, Recipe.named("nvfp4"))
    )
    assert all_precise.curve_loss == baseline.curve_loss != half.curve_loss


class Pairs(Dataset):
    def __init__(self, noise=0.0):
        self.noise = noise

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return torch.full((8,), float(i)) + self.noise * torch.randn(8), i % 4


def test_a_dataset_is_read_once():
    task = task_of(train=Pairs())
    assert task.problem([0]).train_x.shape == (1, 40, 8)
    assert task.problem([0]).train_y[0, 5] == 1
    assert task.digest != task_of().digest == task_of().digest


MISTAKES = {
    "no dict": (lambda: [1], r"own\.py:build: found 'list'; accepted: a dict with model, train, test, loss"),
    "unknown": (lambda: record(epochs=3), r"own\.py:build: key: found 'epochs'; accepted: model, train"),
    "no loss": (lambda: {k: v for k, v in record().items() if k != "loss"}, r"loss: found nothing"),
    "module": (lambda: record(model=Net()), r"model: found 'Net'; accepted: a function that makes the module"),
    "fails": (lambda: record(model=lambda: 1 / 0), r"model: found 'ZeroDivisionError: division by zero'"),
    "no module": (lambda: record(model=lambda: 3), r"model: found 'int'; accepted: a function that returns an nn.Mod"),
    "half": (lambda: record(model=lambda: Net().half()), r"model: stem.weight: found torch.float16; accepted: .*float"),
    "lazy": (lambda: record(model=lambda: nn.LazyLinear(4)), r"model: weight: found 'a parameter of unknown shape'"),
    "forward": (lambda: record(model=lambda: nn.Linear(5, 2)), r"model: found .*takes a batch of .* float32 \[2, 8\]"),
    "vector": (
        lambda: record(loss=lambda out, y: nn.functional.cross_entropy(out["out"], y, reduction="none")),
        r"loss: found \[2\]; accepted: a scalar tensor",
    ),
    "detached": (lambda: record(loss=lambda out, y: out["out"].detach().mean()), r"loss: found 'no gradient'"),
    "bad loss": (lambda: record(loss=lambda out, y: out.mean()), r"loss: found \"AttributeError.*what the model ret"),
    "metric": (lambda: record(metrics={"a": 3}), r"a: found 'int'; accepted: a function of \(outputs, targets\)"),
    "lengths": (lambda: record(test=(torch.zeros(3, 8), torch.zeros(4))), r"test: found \[\[3, 8\], \[4\]\]"),
    "gap": (
        lambda: record(test=(torch.tensor([[0.0] * 8, [torch.nan] * 8]), torch.zeros(2, dtype=torch.int64))),
        r"test: found 'NaN or infinity in sample 1'; accepted: finite inputs",
    ),
    "words": (lambda: record(train="data.csv"), r"train: found 'str'|train: found"),
    "chance": (lambda: record(train=Pairs(1.0)), r"train: found 'a sample that differs when it is read again'"),
    "batch": (lambda: record(batch=65), r"batch: found 65; accepted: 1 … 64"),
    "steps": (lambda: record(steps="many"), r"steps: found 'many'; accepted: Expected `int`"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_that_names_what_to_fix(name):
    given, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=message) as caught:
        plain_task(given(), "own.py:build", "own", "build")
    assert len(str(caught.value).splitlines()) == 1


def test_a_loss_that_is_refused_warns_of_nothing_first():
    """torch warns of sizes that differ before it refuses them, with a path of its own."""
    wrong = record(loss=lambda out, y: nn.functional.mse_loss(out["out"], y.float()))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(ConfigError, match=r"loss: found .*RuntimeError: The size of tensor a"):
            plain_task(wrong, "own.py:build", "own", "build")
    assert said == []


def test_a_warning_of_a_loss_that_is_taken_is_seen():
    doubtful = record(loss=lambda out, y: nn.functional.mse_loss(out["out"][:, :1], y.float()))
    with pytest.warns(UserWarning, match="target size"):
        plain_task(doubtful, "own.py:build", "own", "build")


def test_what_a_slot_of_some_lanes_keeps_is_theirs_after_a_reload():
    """Lanes of one signature, of which one holds a maximum and the other takes the current one."""
    current = Quantizer.named("nvfp4")
    held = msgspec.structs.replace(current, tensor_scale=msgspec.structs.replace(current.tensor_scale, amax="held"))
    there, back = (SequentialNumerics([Recipe.uniform(held), Recipe.uniform(current)], [0, 1]) for _ in range(2))
    x = torch.randn(1, 16, 32)
    for lane in range(2):
        there.of_lane(lane).forward(0, x, x)
    state = there.state()
    assert all(len(value) == 2 for value in state.values())
    back.load_state(state)
    for lane, keeps in enumerate((True, False)):
        ours, theirs = back.each[lane].state(), there.each[lane].state()
        assert ours.keys() == theirs.keys()
        assert bool(ours) == keeps
        assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_a_module_of_every_name_finds_its_place():
    net = initial(Net, 0)
    parameters = {name: value[None] for name, value in named(net).items()}
    model = SequentialLanes(initial(Net, 0), parameters, SequentialNumerics([OFF], [0]), "own.py:build")
    assert set(model.names) == {name for name, p in net.named_parameters() if p.requires_grad}
    net.eval()
    x = torch.randn(4, 8)
    with torch.no_grad():
        assert torch.equal(model(x[None]).outputs[0]["out"], net(x)["out"])
