"""Training by Lightning: the module, the plan of a run, validation and saving."""
