"""What this machine has of what runtimes need: `trtserve doctor`, and what `start` checks first."""
