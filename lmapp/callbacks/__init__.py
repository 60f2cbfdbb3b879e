"""When something is measured during training, and what it is called."""
