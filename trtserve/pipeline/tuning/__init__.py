"""Find the settings of a server that meet a goal best: what may change, what it costs, who wins, and the answer."""
