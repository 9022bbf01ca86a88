"""Where a layer's arrays lie, how they move between host and device, and what fits."""
