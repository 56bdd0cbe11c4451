"""Rollouts of a population: problems, sampled answers and their rewards, cut into minibatches.

At a step that begins a rollout all lanes answer `prompts` problems `samples` times each, by the forward pass that their
recipes have for it; then the trainer's own forward pass says how probable it finds these answers. The following steps
each take a minibatch, in order. Problems and noise are drawn by (seed, step): all recipes of a seed get the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fp4dse.dse import ConfigError
from fp4dse.dse.quantizer import BF16
from fp4dse.kernels import LaneNumerics, lane_mean, lane_sum
from fp4dse.kernels.lanes import Evaluation
from fp4dse.tasks.backward import outputs
from fp4dse.tasks.draws import Draws
from fp4dse.tasks.language.decoder import Block, Decoder, Mlps, Routed
from fp4dse.tasks.language.experts import noting
from fp4dse.tasks.rl.grpo import Clip, Target, advantages, is_clipped, k3, log_probability, share_of
from fp4dse.tasks.rl.inject import Injected
from fp4dse.tasks.rl.kv_cache import CacheFormats
from fp4dse.tasks.rl.noise import ParameterNoise
from fp4dse.tasks.rl.numerics import SamplingNumerics
from fp4dse.tasks.rl.problems import Problems
from fp4dse.tasks.rl.sampling import CachedDecoder, Sampled, gumbel, sample

PROBLEMS, NOISE = 0, 16
"""Sites of the draws."""


class Plan(msgspec.Struct, frozen=True):
    """Numbers of problems in a rollout, of samples of each, of minibatches that they are learned in, and of held-out
    problems.

    asked   problems that are answered for each one that is learned from: DAPO's dynamic sampling (2503.14476) in fixed
            shapes. Of all that are answered the first `prompts` are taken whose answers are neither all right nor all
            wrong; where there are fewer, the rest of the places count for nothing
    """

    problems: Problems = msgspec.field(name="chains")  # in digests, which were there before other kinds
    prompts: int
    samples: int
    minibatches: int
    held_out: int
    clip: Clip = Clip()
    asked: int = 1

    @property
    def batch(self) -> int:
        """Answers in a minibatch."""
        return self.prompts * self.samples // self.minibatches


class Rollouts:
    """The experience of the lanes of a population (tasks/experience.py). numerics: the trainer's.

    Buffers hold a rollout of B = prompts · samples answers of T tokens: `answers` and `inputs` (what the trainer
    reads: the prompt and all tokens but the last), the experts that these went to, and the fields of Target. recorded,
    float32 [L] each, of all answers of the last rollout: `reward`, `length` in tokens, `entropy` of what tokens were
    drawn from, and `mismatch_kl`, KL(rollout, trainer) on the tokens that are learned from, in nats a token;
    `informative`, the share of problems whose answers differ in their rewards, with dynamic sampling.
    """

    observes: tuple[str, ...] = ("ratios_clipped",)

    def __init__(self, plan: Plan, model: nn.Module, numerics: LaneNumerics, draws: Draws) -> None:
        assert isinstance(model, Decoder)
        self.plan, self.model, self.numerics, self.draws = plan, model, numerics, draws
        self.every = plan.minibatches
        length, sampling = plan.problems.prompt_length + plan.problems.answer_length, self._of_rollout()
        rollouts = [recipe.training.rollout for recipe in numerics.recipes]
        formats = CacheFormats([of.kv_cache if of else BF16 for of in rollouts], sampling)
        self.sampler = CachedDecoder(model, sampling, length, formats if formats.slots else None)
        noises = [recipe.training.noise for recipe in numerics.recipes]
        steps = numerics.steps or self.every
        self.noise = ParameterNoise(noises, model, steps, self.every, draws) if any(noises) else None
        injects = [recipe.training.inject for recipe in numerics.recipes]
        self.injected = Injected(injects, model, sampling) if any(injects) else None
        own = sampling.fallbacks if sampling is not numerics else ()
        self.fallbacks = tuple(f"rollout: {reason}" for reason in own)
        self.fallbacks += tuple(f"cache of the rollout: {reason}" for reason in formats.fallbacks)
        if self.injected is not None:
            self.fallbacks += tuple(f"errors of the rollout: {reason}" for reason in self.injected.fallbacks)
        lanes, device, problems = numerics.lanes, numerics.seeds.device, plan.problems
        b, t = plan.prompts * plan.samples, problems.answer_length
        self.inputs = torch.zeros(lanes, b, problems.prompt_length + t - 1, dtype=torch.int64, device=device)
        answers = torch.zeros(lanes, b, t, dtype=torch.int64, device=device)
        asked = (recipe.training.kl for recipe in numerics.recipes)
        weights = [plan.clip.kl if of is None else of for of in asked]
        held = any(weights)
        kl = torch.tensor(weights, device=device).view(-1, 1, 1).repeat(1, b, 1 if held else 0)
        zeros = (torch.zeros(lanes, b, t, device=device) for _ in Target._fields[1:-1])
        self.target = Target._make([answers, *zeros, kl])
        self.error = torch.zeros(lanes, device=device)
        shape = model.blocks[0].shape if isinstance(model.blocks[0], Block) else None
        self.routes: Tensor | None = None
        if shape is not None and shape.experts:
            size = (*self.inputs.shape, shape.depth, shape.mixture.chosen)
            self.routes = torch.zeros(size, dtype=torch.int64, device=device)
        replays = [recipe.training.replay == "router" for recipe in numerics.recipes]
        self.replays = torch.tensor(replays, device=device).view(-1, 1, 1, 1, 1) if any(replays) else None
        names = ["reward", "length", "entropy", "mismatch_kl", *(["informative"] if plan.asked > 1 else [])]
        self.recorded = {name: torch.zeros(lanes, device=device) for name in names}
        bounds = [recipe.training.tis for recipe in numerics.recipes]
        self.tis = torch.tensor([torch.inf if bound is None else bound for bound in bounds], device=device)
        self.corrects = torch.tensor([bound is not None for bound in bounds], device=device)
        self.reference = {name: p.detach().clone() for name, p in model.named_parameters()} if held else {}

    def _of_rollout(self) -> LaneNumerics:
        """The numerics of rollouts: the trainer's, or others if a lane has a rollout of its own. The other lanes then
        compute there as their trainers do, whose forward pass keeps nothing from step to step (`Recipe.signature`)."""
        if all(recipe.training.rollout is None for recipe in self.numerics.recipes):
            if self.numerics.core is not None:
                accepted = "a rollout of its own (a cache of keys and values takes no quantized attention core)"
                raise ConfigError("training.rollout", "trainer", accepted)
            return self.numerics
        found = SamplingNumerics([recipe.sampling() for recipe in self.numerics.recipes], self.numerics)
        for layer, place in self.numerics.places.items():
            found.add_layer(layer, place)
        for module in self.model.modules():
            if isinstance(module, Mlps):
                found.add_experts([layer.layer for layer in module.ups])
                found.add_experts([layer.layer for layer in module.downs])
        return found

    @torch.no_grad()
    def collect(self) -> None:
        """Answer new problems, and store what is to be learned from them."""
        plan, problems, target = self.plan, self.plan.problems, self.target
        asked = problems.prompts(self.draws, PROBLEMS, plan.prompts * plan.asked)
        prompts = asked.repeat_interleave(plan.samples, dim=1)
        noise = gumbel(self.draws, NOISE, problems.answer_length, prompts.shape[1], problems.vocabulary)
        self.sampler.changed = self.noise.drawn() if self.noise else {}
        drawn = self._answers(prompts, noise, "quantized")
        rewards = problems.is_right(prompts, drawn.answers).to(torch.float32)
        counts = problems.is_part(drawn.answers)
        lengths = counts.to(torch.float32).flatten(1).sum(dim=1) / counts.shape[1]  # of integers: any order
        self.error.copy_(1 - lane_mean(rewards))
        found = {"entropy": _mean_of(drawn.entropy, counts), "reward": lane_mean(rewards), "length": lengths}
        if plan.asked > 1:
            rows, taken, found["informative"] = self._chosen(rewards)
            prompts, rewards = _taken(prompts, rows), rewards.gather(1, rows)
            chosen = (None if of is None else _taken(of, rows) for of in drawn)
            drawn, counts = Sampled(*chosen), _taken(counts, rows) & taken[..., None]  # type: ignore[arg-type]
        if self.routes is not None and drawn.routes is not None:
            self.routes.copy_(drawn.routes)
        self.inputs.copy_(torch.cat([prompts, drawn.answers[..., :-1]], dim=-1))
        target.tokens.copy_(drawn.answers)
        advantage = advantages(rewards.view(-1, plan.prompts, plan.samples)).flatten(1)
        target.advantage.copy_(advantage[..., None].expand_as(target.advantage))
        target.log_old.copy_(self._log_p(self.model))
        if self.reference:
            target.log_ref.copy_(self._log_p(None))
        ahead = target.log_old - drawn.log_p  # of the trainer, in log-probability
        weight = torch.minimum(ahead.exp(), self.tis[:, None, None])
        target.weight.copy_(torch.where(self.corrects[:, None, None], weight, 1.0))
        for part in self._parts():
            target.share[:, part] = share_of(counts[:, part])
        for name, value in (found | {"mismatch_kl": _mean_of(k3(ahead), counts)}).items():
            self.recorded[name].copy_(value)

    def _chosen(self, rewards: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of rewards [L, B · asked]: the answers that are learned from, int64 [L, B]; which of them count, bool [L, B];
        and the share of problems whose answers differ in their rewards, [L]."""
        groups, each = rewards.view(len(rewards), -1, self.plan.samples), self.plan.samples
        tells = groups.amax(dim=2) > groups.amin(dim=2)
        places, taken = first_that_tell(tells, self.plan.prompts)
        rows = places[..., None] * each + torch.arange(each, device=places.device)
        return rows.flatten(1), taken.repeat_interleave(each, dim=1), lane_mean(tells.to(torch.float32))

    def _answers(self, prompts: Tensor, noise: Tensor | None, way: Evaluation) -> Sampled:
        """Answers by the numerics of rollouts, which round as in evaluation."""
        sampler = self.sampler
        with sampler.numerics.temporarily(training=False, evaluation=way):
            if self.injected is not None and way != "bf16":
                sampler.changed = self.injected.applied(sampler.changed)
            drawn = sample(sampler, prompts, self.plan.problems.answer_length, noise)
        sampler.changed = {}  # where a step is captured, no tensor may outlive it
        return drawn

    def _log_p(self, model: Decoder | None) -> Tensor:
        """log π of the answers, [L, B, T], in minibatches: under the trainer's forward pass, whose state stays as it
        is, or, for None, of the policy that training began with, in BF16."""
        numerics, found = self.numerics, []
        with numerics.temporarily(training=False, evaluation=numerics.evaluation if model else "bf16"):
            for part in self._parts():
                if model is not None:
                    logits = outputs(model, self._read(part))[0]
                else:
                    inputs = self.inputs[:, part]
                    logits = functional_call(self.model, self.reference, (inputs,))[0].to(torch.float32)
                found.append(log_probability(logits, self.target.tokens[:, part]))
        return torch.cat(found, dim=1)

    def _parts(self) -> list[slice]:
        """The minibatches of a rollout."""
        size = self.plan.batch
        return [slice(n * size, (n + 1) * size) for n in range(self.plan.minibatches)]

    def batch(self) -> tuple[Tensor | Routed, Target]:
        """The minibatch of the present step."""
        number = (self.numerics.step % self.every).view(1)

        def cut(x: Tensor) -> Tensor:
            apart = x.view(len(x), self.every, self.plan.batch, *x.shape[2:])
            return apart.index_select(1, number)[:, 0]

        inputs, target = cut(self.inputs), Target(*map(cut, self.target))
        return self._routed(inputs, None if self.routes is None else cut(self.routes)), target

    def _log_p_now(self, inputs: Tensor | Routed, target: Target, way: Evaluation = "") -> Tensor:
        """log π of a minibatch's tokens, [L, B, T]; the trainer's state stays as it is."""
        with self.numerics.temporarily(training=False, evaluation=way):
            return log_probability(outputs(self.model, inputs)[0], target.tokens)

    @torch.no_grad()
    def in_bf16(self) -> tuple[Tensor | Routed, Target]:
        """The minibatch for a pass of BF16 products, with log-probabilities moved so that ratios, which say how much
        each token counts and which are clipped, are those of the trainer's own pass."""
        inputs, target = self.batch()
        ahead = self._log_p_now(inputs, target, "bf16") - self._log_p_now(inputs, target)
        return inputs, target._replace(log_old=target.log_old + ahead, log_ref=target.log_ref + ahead)

    def _read(self, part: slice) -> Tensor | Routed:
        """The trainer's inputs of a minibatch."""
        return self._routed(self.inputs[:, part], None if self.routes is None else self.routes[:, part])

    def _routed(self, tokens: Tensor, routes: Tensor | None) -> Tensor | Routed:
        """Tokens, with the experts that they went to in lanes that replay these."""
        if self.replays is None or routes is None:
            return tokens
        return Routed(tokens, torch.where(self.replays, routes, -1))

    @torch.no_grad()
    def observed(self, out: tuple[Tensor, Tensor], target: Target) -> dict[str, Tensor]:
        """`ratios_clipped`, the share of a minibatch's tokens whose ratio is beyond its bound: nothing is learned of
        them."""
        log_p = log_probability(out[0].detach(), target.tokens)
        clipped = is_clipped(log_p, target, self.plan.clip).to(torch.float32) * target.share
        return {"ratios_clipped": lane_mean(clipped)}

    @torch.no_grad()
    def statistics(self) -> dict[str, Tensor]:
        """With experts `rerouted`, of the first minibatch: the share of the rollout's choices of experts that the
        trainer's routers would not make now, whether they are replayed or not."""
        if self.routes is None:
            return {}
        part = self._parts()[0]
        with self.numerics.temporarily(training=False), noting(self.model) as noted:
            outputs(self.model, self._read(part))
        routes = self.routes[:, part].flatten(1, 2)  # [L, M, depth, k]
        own = torch.stack(noted, dim=2)
        lost = (routes[..., None] != own[..., None, :]).all(dim=-1)
        return {"rerouted": lane_mean(lost.to(torch.float32)).double()}

    @torch.no_grad()
    def examine(self, x: Tensor, _y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Of held-out problems x [L, n, P], answered by the most probable tokens: 1 where the answer is right, as
        `accuracy`, and the opposite as the loss."""
        drawn = self._answers(x.to(torch.int64), None, self.numerics.evaluation)
        right = self.plan.problems.is_right(x, drawn.answers).to(torch.float32)
        return 1 - right, {"accuracy": right}

    def state(self) -> dict[str, Tensor]:
        """Buffers, statistics and the reference policy."""
        target = self.target._asdict()
        del target["kl"]  # it is the recipe's
        parts = {"target": target, "recorded": self.recorded, "reference": self.reference}
        out = {f"{part}.{name}": value for part, of in parts.items() for name, value in of.items()}
        routes = {} if self.routes is None else {"routes": self.routes}
        return out | routes | {"inputs": self.inputs, "error": self.error}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over copies."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


def first_that_tell(tells: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of tells bool [L, n], in order: the places of the first `count` that are true, then of others, int64 [L, count];
    and which of these are true."""
    before = tells.to(torch.int64).cumsum(dim=1) - tells.to(torch.int64)
    true = tells.sum(dim=1, keepdim=True)
    number = torch.arange(tells.shape[1], device=tells.device).expand_as(before)
    rank = torch.where(tells, before, true + number - before)
    places = torch.empty_like(rank).scatter_(1, rank, number)[:, :count]
    return places, tells.gather(1, places)


def _taken(x: Tensor, rows: Tensor) -> Tensor:
    """Rows [L, m] of x [L, n, …]."""
    return x.gather(1, rows.view(*rows.shape, *[1] * (x.ndim - 2)).expand(*rows.shape, *x.shape[2:]))


def _mean_of(values: Tensor, counts: Tensor) -> Tensor:
    """Mean over the tokens that count, [L], of values [L, B, T]."""
    total = lane_sum(torch.where(counts, values, 0.0).flatten(1), 1)
    return total / counts.flatten(1).sum(dim=1).to(torch.float32)
