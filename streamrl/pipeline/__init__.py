"""The loops of the pipeline, the trainer, and the runner that hosts them all in one process."""
