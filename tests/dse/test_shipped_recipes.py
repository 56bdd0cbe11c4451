"""Every shipped recipe, its six slots as the literature gives them (techniques table: format, rounding, rotation)."""

from fp4dse.dse import SHARED, SLOTS, STAGES, Recipe, recipe_files
from fp4dse.dse.channels import channels_name
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.precision import Finish, Precise
from fp4dse.dse.optimizer import Muon, StableSPAM
from fp4dse.dse.oscillation import OsciReset, QRamping
from fp4dse.dse.schedule import Triangle
from fp4dse.dse.stages import rotation_name
from fp4dse.dse.training import Training
from tests.each import each


def slots(x: str, w: str = "", g: str = "", backward: str = "", **others: str) -> list[str]:
    """Labels in the order of SLOTS: w and g as x, and operands of the backward pass as in the forward, unless given."""
    w, g = w or x, g or x
    if backward:
        return [x, w, *[backward] * 4]
    return [x, w, g, others.get("dgrad_w", w), others.get("wgrad_g", g), others.get("wgrad_x", x)]


SLOTS_OF = {
    "alto-mxfp4": slots("mxfp4-even", w="e2m1 32x32 e8m0-even", g="mxfp4-rceil SR"),
    "amd-mxfp4": slots("mxfp4"),
    "arcquant": slots("nvfp4", g="nvfp4 16/17 SR"),
    "metis": slots("nvfp4 low-rank", w="nvfp4 low-rank-fp32", g="nvfp4 16/17 SR low-rank"),
    "metis-factors": slots(
        "nvfp4 low-rank", w="nvfp4 factors", g="nvfp4 16/17 SR low-rank", dgrad_w="nvfp4", wgrad_x="nvfp4 low-rank"
    ),
    "averis": slots("nvfp4 mean", w="nvfp4", g="nvfp4 16/17 SR mean"),
    "bf16": slots("bf16"),
    "chon": slots("bf16"),
    "fp4-all-the-way": slots("nvfp4", g="nvfp4 16/17 SR", wgrad_x="nvfp4 16/17 SR"),
    "four-over-six": slots("nvfp4-4over6-mse", g="nvfp4 16/17 SR"),
    "hif4-ascend": slots("hif4"),
    "hopper-moe-fp4": slots("mxfp4", w="fp8-128x128", g="fp8-1x128", wgrad_x="fp8-1x128"),
    "luq": slots("int4-sawb", g="luq"),
    "mixfp4": slots("mixfp4", g="nvfp4 16/17 SR"),
    "mxfp4": slots("mxfp4"),
    "mxfp4-ascend": slots("mxfp4-rceil", backward="mxfp4-rceil SR"),
    "mxfp4-sr-rht": slots("mxfp4-rceil", g="mxfp4-rceil SR"),
    "mxfp4-tiles-qkv8": slots("mxfp8-rceil"),
    "nemotron-3-super": slots("nvfp4", w="nvfp4-2d", g="nvfp4 SR"),
    "pact": slots("int4 tensor one T1 learned-clip start=8 decay=0.0002 rate=10", w="int4-sawb", backward="bf16"),
    "primus-turbo": slots("mxfp4-even", w="e2m1 32x32 e8m0-even", g="mxfp4-even"),
    "rl-row-scaled": slots("e2m1 1x16 e4m3 T256 row 4over6-mae", w="nvfp4-4over6-mae", backward="bf16"),
    "te-mxfp8-nvfp4": slots("mxfp8-rceil", g="nvfp4 SR", dgrad_w="nvfp4", wgrad_x="nvfp4"),
    "te-nvfp4-1d": slots("nvfp4", g="nvfp4 SR"),
    "te-nvfp4-mxfp8": slots("e2m1 1x16 e4m3 T448 row", w="nvfp4", backward="mxfp8-rceil"),
    "mxfp4-tiles": slots("mxfp4-2d", g="mxfp4-rceil SR"),
    "luq-fnt": slots("int4-sawb", g="luq", wgrad_g="e3m0 tensor fp32 SMP2"),
    "luq-smp": slots("int4-sawb", g="luq", wgrad_g="e3m0 tensor fp32 SMP2"),
    "nvfp4": slots("nvfp4"),
    "nvfp4-sr": slots("nvfp4", g="nvfp4 16/17 SR"),
    "nvfp4-sr-rht": slots("nvfp4", g="nvfp4 16/17 SR"),
    "nvfp4-stable-spam": slots("nvfp4"),
    "nvfp4-muon": slots("nvfp4"),
    "nvidia-nvfp4-finish": slots("nvfp4", w="nvfp4-2d", g="nvfp4 16/17 SR"),
    "nvidia-nvfp4": slots("nvfp4", w="nvfp4-2d", g="nvfp4 16/17 SR"),
    "quartet": slots("quest-mxfp4", backward="mxfp4 aligned"),
    "quartet2": slots("nvfp4-4over6-mse", backward="ms-eden"),
    "sun-radix4": slots("int4-sawb", g="radix4", wgrad_g="radix4-odd"),
    "sun-radix4-gradscale": slots(
        "int4-sawb", g="radix4 tensor one T1 feedback", wgrad_g="radix4-odd tensor one T1 feedback"
    ),
    "sun-4bit": slots("fp8-current", g="fp8-e5m2-current"),
    "te-nvfp4": slots("nvfp4", w="nvfp4-2d", g="nvfp4 SR"),
    "tetrajet": slots("mxfp4-rceil", backward="mxfp4-rceil SR"),
    "tetrajet-qema": slots("mxfp4-rceil", w="mxfp4-rceil EMA", backward="mxfp4-rceil SR"),
    "tetrajet-qramping": slots("mxfp4-rceil", backward="mxfp4-rceil SR"),
    "tetrajet2": slots("e2m1 1x16 e4m3 T448 segment", backward="e2m1 1x16 e4m3 T448 segment 16/17 SR"),
    "tetrajet2-outcontrol": slots("e2m1 1x16 e4m3 T448 segment", backward="e2m1 1x16 e4m3 T448 segment 16/17 SR"),
    "tetrajet2-reset": slots("e2m1 1x16 e4m3 T448 segment", backward="e2m1 1x16 e4m3 T448 segment 16/17 SR"),
    "tseng-mxfp4": slots("bf16", backward="mxfp4 3/4 SR"),
    "ue5m3-graphcore": slots(
        "e2m1 1x16 ue5m3-61440 T448 held50",
        w="e2m1 16x16 ue5m3-61440 T448 held50",
        g="e2m1 1x16 ue5m3-61440 T448 held50 SR8",
    ),
    "ue5m3-sr": slots("ue5m3-t448", g="ue5m3-t448 16/17 SR"),
    "ufp4": slots("e1m2 1x16 fp32", g="e1m2 1x16 fp32 SR"),
    "wang-dge-occ": slots("fp4-row occ", w="fp4-row", g="fp8-e5m2", dgrad_w="fp8", wgrad_x="fp8"),
    "zhou-mixed": slots("fp8", g="fp8-e5m2", dgrad_w="fp8", wgrad_x="fp8"),
}
"""Recipe -> its six slots."""

ROTATIONS_OF = {
    "alto-mxfp4": ["none", "none", "rht32"],
    "amd-mxfp4": ["none", "none", "hadamard16"],
    "four-over-six": ["none", "none", "rht16"],
    "hif4-ascend": ["rht64", "none", "none"],
    "mxfp4-ascend": ["rht32", "none", "none"],
    "mxfp4-sr-rht": ["none", "none", "rht32"],
    "nemotron-3-super": ["none", "none", "fixed16"],
    "nvfp4-sr-rht": ["none", "none", "rht16"],
    "nvidia-nvfp4-finish": ["none", "none", "rht16"],
    "nvidia-nvfp4": ["none", "none", "rht16"],
    "primus-turbo": ["none", "none", "hadamard16"],
    "quartet": ["hadamard32", "rht32", "rht32"],
    "quartet2": ["none", "rht128", "rht128"],
    "te-nvfp4": ["none", "none", "fixed16"],
    "te-mxfp8-nvfp4": ["none", "none", "fixed16"],
    "te-nvfp4-1d": ["none", "none", "fixed16"],
    "tetrajet2": ["none", "rht16", "rht16"],
    "tetrajet2-outcontrol": ["none", "rht16", "rht16"],
    "tetrajet2-reset": ["none", "rht16", "rht16"],
    "tseng-mxfp4": ["none", "rht64", "rht64"],
    "ufp4": ["rht16", "rht16", "rht16"],
}
"""Recipe -> rotation of fprop, dgrad, wgrad, where there is one."""

BOTH, W, X = ("forward", "forward"), ("forward", "master"), ("master", "forward")
SOURCES_OF = dict.fromkeys(
    ["quartet", "quartet2", "tetrajet", "tetrajet-qema", "tetrajet-qramping", "tetrajet2", "tetrajet2-outcontrol"], BOTH
) | {
    "hopper-moe-fp4": X,
    "pact": BOTH,
    "rl-row-scaled": BOTH,
    "te-mxfp8-nvfp4": W,
    "te-nvfp4-1d": W,
    "te-nvfp4-mxfp8": BOTH,
    "tetrajet2-reset": BOTH,
}
"""Recipe -> sources of dgrad.w and wgrad.x, where the backward pass has the forward's copies of them."""

LAYERS_OF = {
    "chon": [
        "linear+mlp+conv+attention-out: nvfp4, gradients nvfp4 16/17 SR, wgrad rht16, channels hcp",
    ],
    "mxfp4-tiles-qkv8": ["linear+mlp+conv+attention-out: mxfp4-2d, gradients mxfp4-rceil SR"],
    "sun-4bit": [
        "linear+mlp+attention+spatial: fprop.x int4 tensor one T1 learned-clip start=8 decay=0.0002 rate=10, "
        "weights int4-sawb, dgrad.g radix4 tensor one T1 feedback, wgrad.g radix4-odd tensor one T1 feedback, "
        "wgrad.x int4 tensor one T1, wgrad.x from forward"
    ],
    "zhou-mixed": ["linear+mlp+conv: forward fp4-row"],
}
"""Recipe -> its rules for layers."""

CHANNELS_OF = {"arcquant": "arc", "tetrajet2-outcontrol": "outcontrol"}
"""Recipe -> input channels that are treated apart."""

ENDS = Precise(first=0.032, last=0.129)
AROUND_OF = {
    "four-over-six": {"precise": Precise(last=0.167)},
    "fp4-all-the-way": {"finish": Finish(share=0.038, what="backward")},
    "luq-fnt": {
        "finish": Finish(share=0.032, what="all-but-weights"),
        "training": Training(schedule=Triangle(floor=0.01, share=0.032, peak=0.1)),
    },
    "nemotron-3-super": {"precise": Precise(attention=True, last=0.159)},
    "nvfp4-muon": {"training": Training(optimizer=Muon())},
    "nvfp4-stable-spam": {"training": Training(optimizer=StableSPAM(reset=500), beta1=0.9, beta2=0.999)},
    "nvidia-nvfp4": {"precise": ENDS},
    "tetrajet-qramping": {"training": Training(ramping=QRamping())},
    "tetrajet2-reset": {"training": Training(reset=OsciReset(threshold=8.0))},
    "nvidia-nvfp4-finish": {"precise": ENDS, "finish": Finish(share=0.18, what="forward")},
    "rl-row-scaled": {"precise": Precise(last=0.15)},
    "sun-4bit": {"precise": Precise(embedding=False, head=False)},
    "zhou-mixed": {"finish": Finish(share=0.1)},
}
"""Recipe -> layers and steps that are not quantized, and the training side, where they are not the default."""


@each("name", recipe_files())
def test_a_recipe_keeps_precise_what_its_paper_does(name):
    recipe = Recipe.named(name)
    around = {field: getattr(recipe, field) for field in ("precise", "finish", "gemm", "training")}
    defaults = {"precise": Precise(), "finish": None, "gemm": "exact", "training": Training()}
    assert around == defaults | AROUND_OF.get(name, {})


def test_shares_of_blocks_are_those_of_the_papers():
    def kept(name, blocks):
        return [i for i in range(blocks) if Recipe.named(name).precise.why(Place("mlp", i, blocks))]

    assert kept("nvidia-nvfp4", 62) == [0, 1, *range(54, 62)]
    assert kept("four-over-six", 24) == [20, 21, 22, 23]
    assert kept("nemotron-3-super", 88) == [*range(74, 88)]


@each("name", recipe_files())
def test_a_recipe_has_the_six_slots_of_its_paper(name):
    recipe = Recipe.named(name)
    assert [recipe.slot(slot).label() for slot in SLOTS] == SLOTS_OF[name]
    rotations = [rotation_name(recipe.rotation(stage)) for stage in STAGES]
    assert rotations == ROTATIONS_OF.get(name, ["none", "none", "none"])
    assert tuple(recipe.source(stage) for stage in SHARED) == SOURCES_OF.get(name, ("master", "master"))
    assert channels_name(recipe.fprop.channels) == CHANNELS_OF.get(name, "none")
    assert [rule.label() for rule in recipe.layers] == LAYERS_OF.get(name, [])


@each("name", recipe_files())
def test_a_recipe_says_what_it_is_and_where_it_is_from(name):
    file = recipe_files()[name]
    assert len(file.summary) > 10
    assert file.source
