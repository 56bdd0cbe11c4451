"""The definition of quantizers in torch: rounding to a grid, codecs, gradient estimators. All kernels have these
bits."""
