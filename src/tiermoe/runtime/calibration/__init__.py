"""From a checkpoint and a text to the profiles of presets: what needs a loaded model. The arithmetic is in
`tiermoe.calibrate`."""
