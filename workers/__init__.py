"""The processes of a run: launcher, coordinator, optimizer, trainer, monitor. Thin loops around pure parts."""
