"""The terminal programs `eesd` and `eesd-chat`: arguments, rendering, exit codes. Everything else is in `eesd_lite`.

Nothing heavy is imported before the arguments are parsed, so that --help and mistakes answer at once.
"""
