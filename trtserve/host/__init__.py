"""What this machine has: memory, disk, CPU features, ports, GPUs, mpirun and containers."""
