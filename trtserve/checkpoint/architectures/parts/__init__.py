"""What families are built from: tensor names and splits, experts, rotary and ALiBi positions, windows, activations."""
