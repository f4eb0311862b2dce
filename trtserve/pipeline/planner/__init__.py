"""Memory, disk and time that a stage needs, whether this machine or a GPU has it, and what would fit instead."""
