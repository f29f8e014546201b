"""From a recorded trace to the settings and tables of the presets that are calibrated. Pure: no tensors, no files."""
