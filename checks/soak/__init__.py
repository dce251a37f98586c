"""Training and builds that are killed at random moments, for as long as one likes."""
