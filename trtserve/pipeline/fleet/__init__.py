"""Plan a fleet on paper: how many replicas of which shape on which nodes, checked by a simulation in virtual time."""
