"""What a stage takes of memory and disk, whether this machine or a GPU has it, and what would fit instead."""
