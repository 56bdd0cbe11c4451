"""One task at several sizes: how losses and gaps grow, and what a small size says of a larger one.

points           each preset as a point (parameters, tokens) with BF16's loss and paired gaps
loss_law         BF16's loss by parameters and tokens
scaling          effective parameters and data of a recipe, and a power law of its gap
extrapolation    the largest size, foretold from the others
agreement        the order of recipes against published tables
lacking          reasons why rows cannot support these
"""
