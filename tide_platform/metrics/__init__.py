"""What the platform tells Prometheus of a deployment that no other process tells (`tide metrics`)."""
