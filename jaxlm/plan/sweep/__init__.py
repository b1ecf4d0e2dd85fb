"""Many runs of one config: which differences between them are more than noise."""
