"""What a run says about itself: metrics declared once, logs with their actor, the files of the run folder. Needs no torch."""
