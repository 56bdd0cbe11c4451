"""Arithmetic of estimates: arrays of recipes × seeds, no frame of runs.

intervals        intervals and p-values of means over seeds, and their adjustment for many tests; by resampled
spread           how far the mean of a recipe's seeds may be from what it is over all seeds; by draws of variances
simultaneous     recipes against references, all at once
shrinkage        what the gaps of recipes are, once all of them have been seen
least_squares    weighted least squares over a table of recipes × seeds, in the row_space of its design
curve_fits       nonlinear least squares for many data sets at once
rankings         the agreement of two orders
"""
