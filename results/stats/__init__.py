"""Statistics: functions of a frame of runs that return a frame. None of them reads a store or writes a page."""
