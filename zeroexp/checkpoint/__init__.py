"""State that outlives a run: named, whole, and loadable at any number of ranks and any stage."""
