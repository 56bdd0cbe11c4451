"""Layers that must stay in BF16.

study            what was trained for which unit, and what was chosen of it
sensitivity      the cost of quantizing each unit alone, and the gain of sparing it
knapsack         the units to spare within a budget
"""
