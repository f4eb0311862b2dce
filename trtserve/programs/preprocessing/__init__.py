"""Model `preprocessing`: text to token ids."""
