"""Device building blocks of the operations."""
