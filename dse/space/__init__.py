"""Spaces: a base recipe, the axes that vary, and the combinations of them that are taken."""
