"""What every study measures with."""
