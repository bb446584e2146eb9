"""The Ray side of streamrl: one short file per actor kind, and the supervisor that watches them. Private to streamrl.

An actor builds library objects from the configuration, serves their interface, runs one loop of ``streamrl/pipeline/loops.py``,
reports its health and stops. It knows nothing of losses or tokens. Start reading at ``launch.py``; ``host.py`` is what all kinds share.

    launch.py      run(config): connect to Ray, start the actors, wire them, supervise, write the summary
    supervisor.py  watches every actor's run; has dead actors replaced; ends the run with one clear error otherwise
    restarts.py    how each kind is replaced
    members.py     the actors of a run, by name
    cluster.py     the Ray to run on: an own local one, or one that exists
    host.py        base of all actors: settings, typed calls, metrics page, waits, child processes
    remote.py      a typed client of an actor, with deadlines
    children.py    processes an actor started, so that none outlives it
    prompt.py replay.py store.py rollout.py learner.py trainer.py    the kinds
"""
