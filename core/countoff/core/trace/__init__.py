"""The trace: what each rank writes about its run, for a look at it afterwards or meanwhile."""
