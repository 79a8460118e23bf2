"""A run from start to end: the torch-free driver, the workers it starts, and the record they leave
behind.
"""
