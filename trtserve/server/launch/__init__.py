"""How a server becomes processes: the exact commands of every launch mode, and files that start them on a cluster.

`modes.MODES` lists how the ranks of a server are started, and `clusters.CLUSTERS` what can start them instead of this
machine.
"""
