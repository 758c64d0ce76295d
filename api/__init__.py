"""The submitter: HTTP in front of the queue. It knows nothing of models, engines or workers but their cards."""
