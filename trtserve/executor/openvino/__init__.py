"""Models of the engine on OpenVINO, for CPUs."""
