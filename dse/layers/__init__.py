"""Layers that a recipe treats differently: which layers there are, and the rules that say where and what."""
