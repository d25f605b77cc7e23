"""The few types that everybody shares. Knows nothing of torch, models or scheduling."""
