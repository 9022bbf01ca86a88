"""The processes of a run as the trainer sees them: the link, the agreement on placements, calibration, the timeline."""
