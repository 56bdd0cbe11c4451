"""Recipes against one another: which is best, by how much, for what cost, and how sure that is.

summary          a line per recipe: gap, interval, cost, whether it is on the front; the noise floor of BF16
pareto           the Pareto front and the area that it dominates
front_chance     the chance of each recipe to be on the front, the interval of the area
candidates       recipes that may be on the front; confirmed: these on fresh seeds
equivalence      two recipes: different, the same, or undecided
margins          how close two losses must be to count as the same
tokens_worth     what tokens are worth to BF16, which the margin is from
equal_time       loss and time on one scale, by what tokens are worth
overheads        which columns may be an overhead axis
equal_cost       each recipe against the best other one of the same cost
rate_choice      how the learning rates of a setting were chosen, in words
causes           why a recipe loses, from what `fp4dse diagnose` measured
recommendation   the recipe to use in each setting
verdict          what is said of it: how sure that is, what it costs, and warnings
"""
