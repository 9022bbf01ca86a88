"""Looks at runs and machines from outside: `hytrain-monitor` and `hytrain-cluster doctor`. Nothing else imports it."""
