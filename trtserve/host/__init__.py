"""What this machine has: memory, disk, CPU features, ports and GPUs."""
