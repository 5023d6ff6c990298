"""Dashboards and alert rules, and what makes them."""
