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
from fp4dse.kernels import LaneNumerics, lane_mean, lane_sum
from fp4dse.kernels.lanes import Evaluation
from fp4dse.tasks.backward import outputs
from fp4dse.tasks.draws import Draws
from fp4dse.tasks.language.decoder import Decoder
from fp4dse.tasks.rl.chains import Chains
from fp4dse.tasks.rl.grpo import Clip, Target, advantages, is_clipped, k3, log_probability, share_of
from fp4dse.tasks.rl.numerics import SamplingNumerics
from fp4dse.tasks.rl.sampling import CachedDecoder, Sampled, gumbel, sample

PROBLEMS, NOISE = 0, 16
"""Sites of the draws."""


class Plan(msgspec.Struct, frozen=True):
    """Numbers of problems in a rollout, of samples of each, of minibatches that they are learned in, and of held-out
    problems."""

    chains: Chains
    prompts: int
    samples: int
    minibatches: int
    held_out: int
    clip: Clip = Clip()

    @property
    def batch(self) -> int:
        """Answers in a minibatch."""
        return self.prompts * self.samples // self.minibatches


class Rollouts:
    """The experience of the lanes of a population (tasks/experience.py). numerics: the trainer's.

    Buffers hold a rollout of B = prompts · samples answers of T tokens: `answers` and `inputs` (what the trainer
    reads: the prompt and all tokens but the last), and the fields of Target; recorded [L, …] are the statistics.
    """

    def __init__(self, plan: Plan, model: nn.Module, numerics: LaneNumerics, draws: Draws) -> None:
        assert isinstance(model, Decoder)
        self.plan, self.model, self.numerics, self.draws = plan, model, numerics, draws
        self.every = plan.minibatches
        self.sampler = CachedDecoder(model, self._of_rollout(), plan.chains.prompt_length + plan.chains.answer_length)
        own = self.sampler.numerics is not numerics
        self.fallbacks = tuple(f"rollout: {reason}" for reason in self.sampler.numerics.fallbacks if own)
        lanes, device, chains = numerics.lanes, numerics.seeds.device, plan.chains
        b, t = plan.prompts * plan.samples, chains.answer_length
        self.inputs = torch.zeros(lanes, b, chains.prompt_length + t - 1, dtype=torch.int64, device=device)
        answers = torch.zeros(lanes, b, t, dtype=torch.int64, device=device)
        self.target = Target(answers, *(torch.zeros(lanes, b, t, device=device) for _ in Target._fields[1:]))
        self.error = torch.zeros(lanes, device=device)
        names = ("reward", "length", "entropy", "mismatch_kl")
        self.recorded = {name: torch.zeros(lanes, device=device) for name in names}
        bounds = [recipe.training.tis for recipe in numerics.recipes]
        self.tis = torch.tensor([torch.inf if bound is None else bound for bound in bounds], device=device)
        self.corrects = torch.tensor([bound is not None for bound in bounds], device=device)
        self.reference = {name: p.detach().clone() for name, p in model.named_parameters()} if plan.clip.kl else {}

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
        return found

    @torch.no_grad()
    def collect(self) -> None:
        """Answer new problems, and store what is to be learned from them."""
        plan, chains, target = self.plan, self.plan.chains, self.target
        problems = chains.prompts(self.draws, PROBLEMS, plan.prompts)
        prompts = problems.repeat_interleave(plan.samples, dim=1)
        noise = gumbel(self.draws, NOISE, chains.answer_length, prompts.shape[1], chains.vocabulary)
        drawn = self._answers(prompts, noise, "quantized")
        self.inputs.copy_(torch.cat([prompts, drawn.answers[..., :-1]], dim=-1))
        target.tokens.copy_(drawn.answers)
        rewards = chains.is_right(prompts, drawn.answers).to(torch.float32)
        advantage = advantages(rewards.view(-1, plan.prompts, plan.samples)).flatten(1)
        target.advantage.copy_(advantage[..., None].expand_as(target.advantage))
        target.log_old.copy_(self._log_p(self.model))
        if self.reference:
            target.log_ref.copy_(self._log_p(None))
        counts = chains.is_part(drawn.answers)
        ahead = target.log_old - drawn.log_p  # of the trainer, in log-probability
        weight = torch.minimum(ahead.exp(), self.tis[:, None, None])
        target.weight.copy_(torch.where(self.corrects[:, None, None], weight, 1.0))
        for part in self._parts():
            target.share[:, part] = share_of(counts[:, part])
        self.error.copy_(1 - lane_mean(rewards))
        found = {"entropy": _mean_of(drawn.entropy, counts), "mismatch_kl": _mean_of(k3(ahead), counts)}
        lengths = counts.to(torch.float32).flatten(1).sum(dim=1) / counts.shape[1]  # of integers: any order
        for name, value in (found | {"reward": lane_mean(rewards), "length": lengths}).items():
            self.recorded[name].copy_(value)

    def _answers(self, prompts: Tensor, noise: Tensor | None, way: Evaluation) -> Sampled:
        """Answers by the numerics of rollouts, which round as in evaluation."""
        numerics = self.sampler.numerics
        before = numerics.training, numerics.evaluation
        numerics.training, numerics.evaluation = False, way
        drawn = sample(self.sampler, prompts, self.plan.chains.answer_length, noise)
        numerics.training, numerics.evaluation = before
        return drawn

    def _log_p(self, model: Decoder | None) -> Tensor:
        """log π of the answers, [L, B, T], in minibatches: under the trainer's forward pass, whose state stays as it
        is, or, for None, of the policy that training began with, in BF16."""
        numerics, found = self.numerics, []
        before = numerics.training, numerics.evaluation
        numerics.training, numerics.evaluation = False, numerics.evaluation if model else "bf16"
        for part in self._parts():
            inputs = self.inputs[:, part]
            if model is not None:
                logits = outputs(model, inputs)[0]
            else:
                logits = functional_call(self.model, self.reference, (inputs,))[0].to(torch.float32)
            found.append(log_probability(logits, self.target.tokens[:, part]))
        numerics.training, numerics.evaluation = before
        return torch.cat(found, dim=1)

    def _parts(self) -> list[slice]:
        """The minibatches of a rollout."""
        size = self.plan.batch
        return [slice(n * size, (n + 1) * size) for n in range(self.plan.minibatches)]

    def batch(self) -> tuple[Tensor, Target]:
        """The minibatch of the present step."""
        number = (self.numerics.step % self.every).view(1)

        def cut(x: Tensor) -> Tensor:
            apart = x.view(len(x), self.every, self.plan.batch, -1)
            return apart.index_select(1, number)[:, 0]

        return cut(self.inputs), Target(*map(cut, self.target))

    @torch.no_grad()
    def statistics(self) -> dict[str, Tensor]:
        """Of the last rollout: `reward`, `length` of answers in tokens, `entropy` of what tokens were drawn from and
        `mismatch_kl`, KL(rollout, trainer) on these tokens, in nats a token. Of the present minibatch: `clipped`, the
        share of its tokens whose ratio is beyond its bound, so that nothing is learned from them."""
        inputs, target = self.batch()
        before, self.numerics.training = self.numerics.training, False
        log_p = log_probability(outputs(self.model, inputs)[0], target.tokens)
        self.numerics.training = before
        clipped = lane_mean(is_clipped(log_p, target, self.plan.clip).to(torch.float32) * target.share)
        return {name: value.double() for name, value in (self.recorded | {"ratios_clipped": clipped}).items()}

    @torch.no_grad()
    def examine(self, x: Tensor, _y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Of held-out problems x [L, n, P], answered by the most probable tokens: 1 where the answer is right, as
        `accuracy`, and the opposite as the loss."""
        drawn = self._answers(x.to(torch.int64), None, self.numerics.evaluation)
        right = self.plan.chains.is_right(x, drawn.answers).to(torch.float32)
        return 1 - right, {"accuracy": right}

    def state(self) -> dict[str, Tensor]:
        """Buffers, statistics and the reference policy."""
        parts = {"target": self.target._asdict(), "recorded": self.recorded, "reference": self.reference}
        out = {f"{part}.{name}": value for part, of in parts.items() for name, value in of.items()}
        return out | {"inputs": self.inputs, "error": self.error}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over copies."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])


def _mean_of(values: Tensor, counts: Tensor) -> Tensor:
    """Mean over the tokens that count, [L], of values [L, B, T]."""
    total = lane_sum(torch.where(counts, values, 0.0).flatten(1), 1)
    return total / counts.flatten(1).sum(dim=1).to(torch.float32)
