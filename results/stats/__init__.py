"""Statistics: functions of a frame of runs that return a frame. None of them reads a store or writes a page.

    paired           the gap of a run to BF16 on the same seed; each recipe at its best learning rate
    levels           losses as numbers whose differences are gaps: logarithms, or shares
    intervals        intervals and p-values of means over seeds, and their adjustment for many tests
    summary          a line per recipe: gap, interval, cost, whether it is on the front; the noise floor of BF16
    pareto           the Pareto front and the area that it dominates
    front_chance     the chance of each recipe to be on the front, the interval of the area
    equivalence      two recipes: different, the same, or undecided
    margins          how close two losses must be to count as the same
    equal_cost       each recipe against the best other one of the same cost
    factors          the factors that a set of recipes varies
    effects          mean effects and interactions of factors, by least_squares in a row_space; pooled: over tasks
    marginal         the effect of one factor from pairs of recipes that differ in nothing else
    lasso            stability selection, for comparison with arXiv 2509.17791
    divergence       the share of recipes that diverged, by level
    loss_law         BF16's loss by parameters and tokens, by curve_fits, from the points and draws of sizes
    scaling          effective parameters and data of a recipe, and a power law of its gap
    extrapolation    the largest size, foretold from the others
    agreement        the order of recipes against published tables, by rankings
    lacking          reasons why rows cannot support some of these
    rate_choice      how the learning rates of a setting were chosen, in words
    verdict          the recipe to use, how sure that is, what it costs, and warnings

A new statistic is a module here and a line in views.py, which makes it a view of `fp4dse query`.
"""
