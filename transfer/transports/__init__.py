"""The lanes. `base` says what a lane is; to add one, implement it, let `baton.transfer.testing` check it, and name it
in `baton.transfer.lanes` and in `baton.common.config.LANES`."""
