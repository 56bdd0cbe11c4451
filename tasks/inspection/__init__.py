"""Trainings that are looked at closely: why a recipe loses, and which layers a score would spare."""
