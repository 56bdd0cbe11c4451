"""Reinforcement learning with verifiable rewards, in which rollouts may have another forward pass than training."""

from fp4dse.tasks.rl.presets import PRESETS

__all__ = ["PRESETS"]
