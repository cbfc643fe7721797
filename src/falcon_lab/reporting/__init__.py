"""results.json, report.html and experiment tracking."""
