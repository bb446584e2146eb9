"""Words that the front end and the worker must agree on: vLLM carries an error between processes as its text only."""

REFUSED = "snapshot refused, weights unchanged: "
