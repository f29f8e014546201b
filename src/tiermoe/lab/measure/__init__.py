"""Recording, calibrating and evaluating loaded models."""
