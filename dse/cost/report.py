"""The figures that `fp4dse cost` prints, as plain data."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from fp4dse.dse.cost import memory, operands
from fp4dse.dse.cost.chip import Chip
from fp4dse.dse.cost.decoding import CONTEXT, SEQUENCES, memory_bytes, samples_tokens, token_seconds
from fp4dse.dse.cost.exchange import exchanged_bytes
from fp4dse.dse.cost.iteration import Workload, iteration
from fp4dse.dse.cost.model import Linear, Model, told_apart
from fp4dse.dse.cost.points import points
from fp4dse.dse.cost.scenario import BAND, ENDS, scenarios
from fp4dse.dse.cost.step import (
    CORE,
    EXCHANGE,
    KEPT,
    REST,
    UNMODELLED,
    estimator_work,
    is_bf16,
    layers_by_recipe,
    quantized_and_kept,
    relative_time,
    step_cost,
)
from fp4dse.dse.cost.storage import activation_bits, bits_per_element
from fp4dse.dse.cost.units import gemm_of, notes
from fp4dse.dse.cost.work import Work
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.layers.precision import Precise
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.stages import SLOTS, STAGES


def summary(recipe: Recipe, model: Model, chip: Chip, extra_tokens: float | None = None) -> dict[str, Any]:
    """The figures of a recipe. Times are of one micro-batch, in µs; activations are the inputs of layers
    with weights, of which precise ones keep 16 bits an element. Bits an element are of layers that no rule concerns."""
    mine, bf16 = step_cost(recipe, model, chip), step_cost(Recipe.named("bf16"), model, chip)
    band = {row["scenario"]: row["overhead"] for row in by_scenario(recipe, model, chip)}
    plain, relative = step_cost(Recipe.named("mxfp4"), model, chip), relative_time(recipe, model, chip)
    parts = layers_by_recipe(recipe, model)
    kept = sum(
        linear.count * linear.tokens * linear.inputs * activation_bits(r)
        for r, part in parts
        for linear in part.linears
    )
    if recipe.is_plain:  # what would be precise if the recipe quantized
        parts = [(recipe, part) for place, part in told_apart(model, recipe.precise) if recipe.precise.why(place)]
    precise = sum(linear.count for r, part in parts if recipe.is_plain or is_bf16(r) for linear in part.linears)
    facts = {
        "recipe": recipe.label(),
        "config_id": recipe.config_id,
        "model": model.name,
        "chip": chip.name,
        "step_us": 1e6 * mine.total,
        "bf16_step_us": 1e6 * bf16.total,
        "overhead": relative,
        **{name: band[end] for name, end in zip(BAND, ENDS, strict=True)},
        "over_plain_fp4": mine.total / plain.total,
        "layers": sum(linear.count for linear in model.linears),
        "precise_layers": precise,
        "points": points(recipe),
        "bits_per_element": bits_per_element(recipe),
        "activation_bits": activation_bits(recipe),
        "activation_mib": model.tokens * kept / 8 / 2**20,
        "tokens_to_spare": tokens_to_spare(relative),
    }
    if extra_tokens is not None:
        facts["time_to_quality"] = time_to_quality(relative, extra_tokens)
    return {**facts, "notes": [*notes(recipe, chip), *_idle_rules(recipe, model)]}


def _idle_rules(recipe: Recipe, model: Model) -> list[str]:
    """A line for every rule for layers that applies to none of the model's."""
    places = [place for linear in model.linears for place in model.places(linear)]
    idle = [rule for rule in recipe.layers if not any(map(rule.matches, places))]
    return [f"{rule.where()}: {model.name} has no such layers; the rule costs nothing here" for rule in idle]


def by_scenario(recipe: Recipe, model: Model, chip: Chip) -> list[dict[str, Any]]:
    """The step under each scenario, with the best software first: µs, BF16's, the overhead, what is assumed."""
    rows = []
    for name, scenario in scenarios().items():
        mine, bf16 = (step_cost(r, model, chip, name).total for r in (recipe, Recipe.named("bf16")))
        relative = relative_time(recipe, model, chip, name)
        times = {"step_us": 1e6 * mine, "bf16_us": 1e6 * bf16, "overhead": relative}
        rows.append({"scenario": name, **times, "assumes": scenario.summary})
    return rows


SHOWN = (1, 16, SEQUENCES)
"""Answers that are sampled at once, of the rollouts that are shown."""


def rollout(recipe: Recipe, model: Model, chip: Chip) -> list[dict[str, Any]]:
    """Sampling with the recipe's rollout, or its own forward pass: for so many sequences at once µs for a token of
    each, BF16's, the gain, tokens a second of all, and GB of weights, keys and values, which may be more than the chip
    has. Empty for models that read no tokens one after another."""
    rows = []
    for sequences in SHOWN if samples_tokens(model) else ():
        mine, bf16 = (token_seconds(r, model, chip, sequences, CONTEXT) for r in (recipe, Recipe.named("bf16")))
        times = {"token_us": 1e6 * mine, "bf16_us": 1e6 * bf16, "faster": bf16 / mine}
        gigabytes = memory_bytes(recipe, model, sequences, CONTEXT) / 1e9
        rows.append({"sequences": sequences, **times, "tokens_per_s": sequences / mine, "gb": gigabytes})
    return rows


def iterations(
    recipe: Recipe, model: Model, chip: Chip, workload: Workload, share: float | None = None
) -> list[dict[str, Any]]:
    """An iteration of reinforcement learning under each scenario: seconds of its rollout and of its updates, BF16's,
    the share of the rollout in BF16's, and both together relative to BF16's. share: of the rollout, instead of the
    modelled one. Empty for models that read no tokens one after another."""
    if share is not None and not 0 <= share <= 1:
        raise ConfigError("--rollout-share", share, "a share of BF16's iteration, from 0 to 1")
    rows = []
    for name in scenarios() if samples_tokens(model) else ():
        found = iteration(recipe, model, chip, workload, name)
        rows.append(
            {
                "scenario": name,
                "rollout_s": found.rollout,
                "update_s": found.update,
                "bf16_rollout_s": found.bf16_rollout,
                "bf16_update_s": found.bf16_update,
                "rollout_share": found.share if share is None else share,
                "iteration_overhead": found.overhead(share),
            }
        )
    return rows


def fits(recipe: Recipe, model: Model, chip: Chip) -> list[dict[str, Any]]:
    """The memory of the chip under BF16 and under the recipe: GB of states, of what is kept where no block is made
    again, and in all; the share of blocks that have to be made again to fit, and tokens a second of the GPU with these.
    Empty for shapes that do not say what passes between blocks, and chips of unknown memory."""
    rows: list[dict[str, Any]] = []
    for name, r in {"bf16": Recipe.named("bf16"), "this recipe": recipe}.items():
        if not model.residual or chip.capacity is None:
            break
        state, total = model.parameters * model.state_bytes, memory.memory(r, model)
        found = memory.fit(r, model, chip, chip.capacity.value)
        rows.append(
            {
                "recipe": name,
                "states_gb": state / 1e9,
                "kept_gb": (total - state) / 1e9,
                "gb": total / 1e9,
                "made_again": None if found is None else found.recomputed,
                "tokens_per_s": None if found is None else found.tokens_per_s,
            }
        )
    return rows


def sent(recipe: Recipe, model: Model) -> list[dict[str, Any]]:
    """The four all-to-alls of a micro-batch: MB that a GPU sends to others, BF16's, and their ratio."""
    if not model.exchange:
        return []
    mine, bf16 = (exchanged_bytes(r, model) for r in (recipe, Recipe.named("bf16")))
    return [
        {"all_to_all": way, "mb": mine[way] / 1e6, "bf16_mb": bf16[way] / 1e6, "of_bf16": mine[way] / bf16[way]}
        for way in mine
        if bf16[way]
    ]


def time_to_quality(overhead: float, extra_tokens: float) -> float:
    """T/T₀ = (1 + τ)/(1 + g): training time to the quality that BF16 reaches, relative to BF16's (arXiv 2610.00053).

    overhead      step time relative to BF16's, 1/(1 + g) for a throughput gain g
    extra_tokens  τ, the share of tokens more than BF16 that the target takes: 0.1 is 10 % more
    """
    if not -1 < extra_tokens < math.inf:
        raise ConfigError("--extra-tokens", extra_tokens, "a number above -1 (0.1 is 10 % more tokens than BF16)")
    return (1 + extra_tokens) * overhead


def tokens_to_spare(overhead: float) -> float:
    """The τ at which a recipe is as fast as BF16: how many more tokens its step time pays for."""
    return 1 / overhead - 1


def split(recipe: Recipe, model: Model, chip: Chip) -> list[dict[str, Any]]:
    """The step by part, in the order of PARTS: µs, share of the step, and BF16's and plain FP4's time for the part.

    Plain FP4 is the recipe `mxfp4`: a maximum, a scale and a rounding to nearest a block, and nothing else. The part
    KEPT is of the layers that the recipe keeps precise, in all three; what plain FP4 alone keeps counts as products.
    """
    quantized, kept = quantized_and_kept(recipe, model)
    mine = step_cost(recipe, model, chip)
    others = [
        {**_parted(Recipe.named(name), quantized, kept, chip), UNMODELLED: mine.seconds[UNMODELLED]}
        for name in ("bf16", "mxfp4")
    ]
    rows = []
    for part in mine.seconds:
        times = [1e6 * seconds[part] for seconds in (mine.seconds, *others)]
        if any(times):
            us, bf16, plain = times
            share = mine.seconds[part] / mine.total
            rows.append({"part": part, "us": us, "share": share, "bf16_us": bf16, "plain_fp4_us": plain})
    return rows


def _parted(recipe: Recipe, quantized: Model, kept: Model, chip: Chip) -> dict[str, float]:
    """Seconds by part, with those of the layers `kept` as one part."""
    seconds, there = step_cost(recipe, quantized, chip).seconds, step_cost(recipe, kept, chip)
    products = seconds["products"] + seconds[KEPT]
    apart = sum(there.seconds[name] for name in (CORE, EXCHANGE, REST, UNMODELLED))
    return {**seconds, "products": products, KEPT: there.total - apart}


def operations(recipe: Recipe, chip: Chip) -> list[dict[str, Any]]:
    """Bytes and instructions per element of the tensor, by slot and technique. What slots share stands at the first."""
    rows: list[dict[str, Any]] = []
    for tensor, (first, second) in operands.USED_BY.items():
        uses = operands.tensor_uses(tensor, getattr(recipe, first), getattr(recipe, second), chip, gemm_of(recipe))
        for kernel in operands.passes(uses, chip):
            rows += [_row(item.slot, item.technique, item.work * kernel.per_step) for item in kernel.items]
    for operand in STAGES["fprop"]:
        done = estimator_work(operand, recipe.fprop, getattr(recipe.estimator, operand))
        rows += [_row(f"fprop.{operand}", "estimator", done)] if done != Work() else []
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        found = merged.setdefault((row["slot"], row["technique"]), row)
        if found is not row:
            found.update({name: found[name] + row[name] for name in Work.__struct_fields__})
    order = {slot: i for i, slot in enumerate(SLOTS)}
    return sorted(merged.values(), key=lambda row: (order[row["slot"]], operands.TECHNIQUES.index(row["technique"])))


def layer_overhead(recipe: Recipe, linear: Linear, model: Model, chip: Chip) -> float:
    """Modelled time of one kind of layer where it is quantized, forward and backward, relative to BF16's."""
    rest = {"parameters": 0, "attention": [], "traffic": [], "micro_batches": 1, "blocks": 1, "pattern": ""}
    linear = msgspec.structs.replace(linear, count=1, kind="linear", at="", together=1, expert=False)
    alone = msgspec.structs.replace(model, linears=[linear], **rest)
    there = msgspec.structs.replace(recipe, precise=Precise(), layers=(), finish=None)
    mine, bf16 = (step_cost(r, alone, chip) for r in (there, Recipe.named("bf16")))
    return (mine.total - mine.seconds[UNMODELLED]) / (bf16.total - bf16.seconds[UNMODELLED])


def _row(slot: str, technique: str, done: Work) -> dict[str, Any]:
    return {"slot": slot, "technique": technique, **{name: getattr(done, name) for name in Work.__struct_fields__}}
