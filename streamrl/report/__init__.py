"""One run as one HTML page: read from the run folder, drawn without a network. Needs no torch and no server.

Follow it in this order: ``collect`` reads the folder into a ``Report`` (``model``), with the help of ``board_charts`` (the dashboards' panels),
``step_charts`` (the step log) and ``tables``; ``page`` writes it as HTML with what lies in ``assets/``.
"""
