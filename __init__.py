"""fp4dse: which FP4 training techniques buy the most quality for the least overhead."""

from importlib.metadata import version

__version__ = version("fp4dse")
