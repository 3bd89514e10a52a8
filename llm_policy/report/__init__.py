"""What report.py writes: results/ as tables and curves, one file per subject."""
