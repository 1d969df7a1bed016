"""`eesd bench offload`: one model under a real memory limit, over memories, exit layers, controllers and link rates.

`settings` says what is asked, `worker` is our engine in a process of its own, `run` measures point by point with
everybody taking turns, `report` and `plots` write what was found.
"""
