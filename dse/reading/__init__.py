"""Recipes in files: from TOML and JSON, with their shorthand and names of one's own, to records and back."""
