"""Scores of random answers that differ from each other, so that there is something to learn from."""


def token_share(data_source, solution_str, ground_truth, extra_info):
    """The share of digits in the answer, and how short it is, as components of one score."""
    digits = sum(character.isdigit() for character in solution_str) / max(len(solution_str), 1)
    brevity = 1 / (1 + len(solution_str))
    return {"score": digits + 0.1 * brevity, "digits": digits, "brevity": brevity}


token_share.inline = True
