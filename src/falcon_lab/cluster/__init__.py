"""The data of an experiment, made by the machines of a Ray cluster."""
