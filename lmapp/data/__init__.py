"""Text -> ids -> batches."""
