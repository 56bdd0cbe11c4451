"""Plans: what a sweep would train, before anything is trained.

setting          its tasks, what their rows share, and the machine of its workers
plan             recipes × learning rates × seeds, less what the store has, cut into jobs
job_sizes        the number of lanes that trains most lanes a second, measured
estimate         the time of a plan and the memory of a worker
halving          rungs at which lagging lanes are dropped, and what they would have saved
"""
