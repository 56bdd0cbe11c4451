"""A sweep or a search while it runs: jobs out, rows in, whatever happens on the way.

opening          a locked store, an executor, signals and a display around the loop
driver           the loop between the executor and the store
scheduler        the next job, and what follows from the end of one
baselines        BF16 beside every recipe on every kind of device
store_writer     finished jobs on their way into the store
resume           jobs of a driver that is gone; rerun: one job again, in the foreground
state            the record that `fp4dse status` shows; progress: a display of it
stopping         the end of a sweep, from inside and outside
"""
