"""The frozen target and every way its forward pass is run."""
