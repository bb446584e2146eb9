"""Why a run does not go on: who waits for whom, down to the one that waits for nobody.

    answers.py    what the driver heard of its actors, written to ``waits.json`` once a second
    view.py       a run as its folder's files show it
    diagnose.py   the walk from the trainer to the root, and the verdict
    sources.py    its first half: trainer, replay buffer, prompts
    workers.py    its second half: rollout actors and their sessions, store, publication
    queues.py     calls that wait for a slot, and who has it
    ranks.py      and the learner
    needed.py     actors that the run cannot do without, wherever the walk ends
    driver.py     the driver, in a few words
    roots.py      what can be wrong at the end of a chain, in words, with the next step
    alarm.py      when the driver says so by itself
    stacks.py     stack dumps of processes, hung ones too
    printing.py   what a person reads

Works on files alone, so it says the same when the driver hangs or is dead. Changes nothing. Imports neither torch nor Ray.
"""

from streamrl.diagnosis.diagnose import diagnose
from streamrl.diagnosis.result import Diagnosis, Link
from streamrl.diagnosis.view import RunView, read_view

__all__ = ["Diagnosis", "Link", "RunView", "diagnose", "read_view"]
