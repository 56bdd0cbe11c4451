"""Techniques: what one does to the loss, over many recipes.

effects          mean effects and interactions of factors: a linear model with contrasts; pooled: over tasks
marginal         the effect of one factor from pairs of recipes that differ in nothing else
lasso            stability selection, for comparison with arXiv 2509.17791
divergence       the share of recipes that diverged, by level
recovered        the share that fine-tuning gives back of what rounding to nearest loses
questions        questions of a file, to be written before the training; answers: from pairs of recipes
"""
