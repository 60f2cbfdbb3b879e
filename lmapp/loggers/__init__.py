"""Where figures go: the run's own files and Weights & Biases."""
