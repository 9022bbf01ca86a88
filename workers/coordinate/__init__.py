"""The coordinator process: who takes part, plans, records, status."""
