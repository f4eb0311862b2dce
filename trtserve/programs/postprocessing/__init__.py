"""Model `postprocessing`: token ids to text."""
