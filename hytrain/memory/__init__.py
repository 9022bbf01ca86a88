"""Where a layer's arrays are kept, how they move between host and device, and how much fits."""
