"""Trainings that learn from samples of their own (reinforcement learning).

numbers          numbers of such a training, one of each a lane
effects          the effect of each treatment on each number
"""
