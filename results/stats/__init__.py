"""Statistics: functions of a frame of runs that return a frame. None of them reads a store or writes a page.

    paired           the gap of a run to BF16 on the same seed; each recipe at its best learning rate
    levels           losses as numbers whose differences are gaps: logarithms, or shares
    stages           rows that chose learning rates, screened ones, and fresh ones of the candidates
    factors          the factors that a set of recipes varies

    estimates        arithmetic of means, spreads, intervals and fits, which knows no frame
    sizes            one task at several sizes, and against published tables
    recipes          which recipe is best, by how much, for what cost, and how sure that is
    techniques       what a technique does to the loss, over many recipes
    layers           layers that must stay in BF16
    rollouts         trainings that learn from samples of their own

Each folder imports those above it and none below. A new statistic is a module in one of them and a line in views.py,
which makes it a view of `fp4dse query`.
"""
