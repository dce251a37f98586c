"""What describes machines and their devices."""
