"""`baton doctor`: what of a machine, of the machines of a Ray cluster, or of a running Baton would keep it from working
well, and the way out (docs/DOCTOR.md).

    examination.py ── asks ──► probe.py, one or two per host     judge*.py ── findings ──► report.py
      what was found            prober.py: the real lanes          pure                     people, JSON
"""
