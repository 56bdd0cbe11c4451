"""Recipes against one another: which is best, by how much, for what cost, and how sure that is.

summary          a line per recipe: gap, interval, cost, whether it is on the front; the noise floor of BF16
pareto           the Pareto front and the area that it dominates
front_chance     the chance of each recipe to be on the front, the interval of the area
candidates       recipes that may be on the front; confirmed: these on fresh seeds
equivalence      two recipes: different, the same, or undecided
margins          how close two losses must be to count as the same
equal_cost       each recipe against the best other one of the same cost
rate_choice      how the learning rates of a setting were chosen, in words
causes           why a recipe loses, from what `fp4dse diagnose` measured
verdict          the recipe to use, how sure that is, what it costs, and warnings
"""
