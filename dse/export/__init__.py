"""A recipe as the settings of another library that realise it, with what they cannot express."""

from fp4dse.dse.export.listed import Settings
from fp4dse.dse.export.settings import TARGETS, Export, export

__all__ = ["TARGETS", "Export", "Settings", "export"]
