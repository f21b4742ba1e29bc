"""An OpenAI-compatible server around one engine.

    HTTP task --submit--> inbox --> engine thread: Engine.step --> events --> HTTP task --> client

`worker` owns the engine in a thread of its own, so that the event loop answers while a pass runs.
`schema` and `messages` say which requests are understood, `turns` what a chat means to the model at
hand, `replies` how they are answered; `app` puts it all on routes, `run` on a port. `metrics` and
`figures` count what speculation brought. Nothing here costs the seconds of `import torch` before
the engine thread loads its model.
"""
