"""Training a population: lanes of one task in lock-step, each with its own recipe, learning rate and seed.

Every tensor carries the lane axis first, nothing is reduced across lanes, and batches, initial weights and random bits
come from counters, so a lane's trajectory depends on its own (recipe, learning rate, task, preset, seed) alone. A lane
whose loss or gradient becomes NaN or Inf is frozen at that step; its neighbours do not notice.

    population   tensors of running lanes and the step, captured as CUDA graphs
    batches      which samples a step takes
    loss_record  the training losses
    recorder     what is recorded of some steps, or of all
    recent       numbers of the last steps, on the device
    weight_errors  the errors of the weights that sample
    kept         the bytes that the forward pass keeps for the backward pass
    evaluation   the held-out data, and what became of a lane
    run          from the first step to the results: reports, rungs, checkpoints
    checkpoint   a population in a file
    lane_counts  the number of lanes that fit, and the one that is fastest
"""

from fp4dse.tasks.engine.loss_record import curve_steps
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.engine.run import Pruning, Stopped, train

__all__ = ["Population", "Pruning", "Stopped", "curve_steps", "train"]
