"""Jobs: what a worker is given and leaves.

machine          the machine of a sweep, shared out among its workers
jobfolder        a job on disk
rows             a lane and what became of it, as a row of the store
"""
