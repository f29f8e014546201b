"""What studies the engine: traces, simulation, the papers, measurements. The product does not import it."""
