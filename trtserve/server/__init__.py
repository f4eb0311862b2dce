"""The life cycle of a server: plan, check, launch, supervise, stop and clean up.

`plan` makes the plan of a start, `start` runs it, `supervision` watches what runs, `shutdown` ends it, and
`state` records it. Import from the modules: this package stays empty, so that `query` loads only what finds a server.
"""
