"""What a device can do and how arrays get there. Knows nothing of models."""
