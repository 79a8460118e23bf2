"""Pipeline parallelism: schedules as data.

A schedule is a list of actions per rank (:mod:`.action`, :mod:`.schedule`). Generators write it
(:mod:`.schedules`), passes add what has to be sent or gathered (:mod:`.transfers`,
:mod:`.residency`), a validator proves it (:mod:`.validate`), a simulator gives its clock, memory
and bytes (:mod:`.simulate`), and :mod:`.choose` picks one. All of this is arithmetic on the
standard library: a plan needs no torch.
"""
