"""streamrl: asynchronous RL of language models over a log. The rooms, in the order a token travels:

envs -> buffer -> batcher -> learner -> weights -> inference -> envs; a pool of scorers may stand
between batcher and learner. `stream/` is the log between them, `records.py` what lies in it,
`orchestrator/` starts and watches the parts, `replay/` runs a recorded run again, `dashboard/`
shows one in the browser.
"""

__version__ = "0.1.0"
