"""A YAML file that names models and the servers that serve them, and what it takes to get there."""
