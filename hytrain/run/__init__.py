"""The trainer's side of a run: cluster, link, the agreement on placements, calibration, the timeline."""
