"""The seeded world: the real cores, sessions and rosters on virtual time, with everything around them simulated and
made to fail. `baton sim --seed N --trace` replays one seed."""
