"""What a Triton model repository is: its models in every release, making one, reading one, and checking one."""
